#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make a kustomize component that adds the recorder, and a container that serves /metrics,
# to a workload of vLLM:
#
#   sh deploy/component.sh KIND WORKLOAD CONTAINER UID FOLDER
#
#   KIND       Deployment, StatefulSet, LeaderWorkerSet/leader or LeaderWorkerSet/worker
#   WORKLOAD   the name of that resource
#   CONTAINER  the name of its container that runs vLLM
#   UID        the number of the user that runs vLLM there, 0 in vLLM's own image: only
#              that user can read the records, so kvtax-look runs as it, too
#   FOLDER     where to write; name it under `components` in your kustomization.yaml
#
# A leader and its workers are one component each. The build ends with an error that has
# the name of a workload or a container that is not there.
set -eu
usage() { sed -n '3,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -eq 5 ] || usage
case $1 in
    Deployment | StatefulSet) kind=$1 template=spec.template ;;
    LeaderWorkerSet/leader | LeaderWorkerSet/worker)
        kind=${1%/*} template=spec.leaderWorkerTemplate.${1#*/}Template ;;
    *) usage ;;
esac
for name in "$2" "$3"; do
    case $name in
        *[!a-z0-9.-]* | '') echo "component.sh: '$name' is no name of Kubernetes" >&2; exit 2 ;;
    esac
done
case $4 in
    *[!0-9]* | '') echo "component.sh: '$4' is no number of a user" >&2; exit 2 ;;
    0) non_root=false ;;
    *) non_root=true ;;
esac
mkdir -p "$5"
recorder=kvtax-recorder-$(echo "$1" | tr 'A-Z/' 'a-z-')
sed -e "s/^  name: kvtax-recorder$/  name: $recorder/" \
    -e "/^look:/,/^volumes:/s/runAsUser: .*/runAsUser: $4/" \
    -e "/^look:/,/^volumes:/s/runAsNonRoot: .*/runAsNonRoot: $non_root/" \
    "$(dirname "$0")/recorder.yaml" >"$5/recorder.yaml"

# put PART PLACE: put a part of recorder.yaml at a place in the pod.
put() {
    echo "- source: {kind: Recorder, name: $recorder, fieldPath: $1}
  targets:
  - select: {kind: $kind, name: $2}
    options: {create: true}
    fieldPaths: ['$template.spec.$3']"
}

{
    echo "# Made by deploy/component.sh $1 $2 $3 $4.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
resources: [recorder.yaml]
replacements:
# Changes nothing; ends with an error where there is no such workload or container.
- source: {kind: $kind, name: $2, fieldPath: '$template.spec.containers.[name=$3].name'}
  targets:
  - select: {kind: $kind, name: $2}
    fieldPaths: ['$template.spec.containers.[name=$3].name']"
    put init "$2" 'initContainers.[name=kvtax-probe]'
    for variable in PYTHONPATH KVTAX_STEP_RECORDS_DIR KVTAX_STEP_RECORDS_MAX_MB; do
        put "env.$variable" "$2" "containers.[name=$3].env.[name=$variable]"
    done
    put mounts.probe "$2" "containers.[name=$3].volumeMounts.[mountPath=/opt/kvtax]"
    put mounts.records "$2" "containers.[name=$3].volumeMounts.[mountPath=/records]"
    put look "$2" 'containers.[name=kvtax-look]'
    put volumes.probe "$2" 'volumes.[name=kvtax-probe]'
    put volumes.records "$2" 'volumes.[name=kvtax-records]'
} >"$5/kustomization.yaml"
