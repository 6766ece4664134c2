// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"

	"github.com/llm-d/llm-d-inference-scheduler/pkg/plugins/preparedata"
	upstream "github.com/llm-d/llm-d-inference-scheduler/pkg/plugins/scorer"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/datalayer"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/plugin"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/interface/scheduling"
	"sigs.k8s.io/gateway-api-inference-extension/pkg/epp/framework/plugins/scheduling/scorer/prefix"

	"kvtax/kvindex/llmd"
	"kvtax/kvindex/llmd/router"
)

const (
	blockTokens = 4
	deadline    = time.Minute
	// lastPod publishes after all others, so that who knows of its blocks knows everything.
	lastPod = "10.0.1.1:8000"
)

// A contestant is a scorer, and where it listens for events.
type contestant struct {
	scheduling.Scorer
	endpoint string
}

// A kind makes contestants: of keys that its index holds at most, workers of its event
// pool, and tokens per block.
type kind struct {
	name string
	make func(t testing.TB, capacity, workers, blockTokens int) contestant
}

var kinds = []kind{
	{"llm-d's scorer", newUpstream},
	{"llm-d's index", func(t testing.TB, capacity, workers, tokens int) contestant {
		index, err := kvblock.NewInMemoryIndex(indexConfig(capacity))
		return newComposed(t, index, err, workers, tokens)
	}},
	{"kvindex", func(t testing.TB, capacity, workers, tokens int) contestant {
		index, err := llmd.New(indexConfig(capacity))
		return newComposed(t, index, err, workers, tokens)
	}},
}

func indexConfig(capacity int) *kvblock.InMemoryIndexConfig {
	return &kvblock.InMemoryIndexConfig{Size: capacity, PodCacheSize: kvblock.DefaultInMemoryIndexConfig().PodCacheSize}
}

// newUpstream is llm-d's scorer as llm-d's router makes it.
func newUpstream(t testing.TB, capacity, workers, tokens int) contestant {
	t.Helper()
	indexer, err := kvcache.NewDefaultConfig()
	if err != nil {
		t.Fatal(err)
	}
	indexer.KVBlockIndexConfig.InMemoryConfig = indexConfig(capacity)
	events := eventsConfig(t, workers)
	scorer, err := upstream.New(production(t), upstream.PrecisePrefixCachePluginConfig{
		TokenProcessorConfig: &kvblock.TokenProcessorConfig{BlockSizeTokens: tokens},
		IndexerConfig:        indexer,
		KVEventsConfig:       events,
	})
	if err != nil {
		t.Fatal(err)
	}
	return contestant{scorer, events.ZMQEndpoint}
}

func newComposed(t testing.TB, index kvblock.Index, err error, workers, tokens int) contestant {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	events := eventsConfig(t, workers)
	processor := &kvblock.TokenProcessorConfig{BlockSizeTokens: tokens}
	scorer, err := router.New(production(t), index, processor, events)
	if err != nil {
		t.Fatal(err)
	}
	return contestant{scorer, events.ZMQEndpoint}
}

func eventsConfig(t testing.TB, workers int) *kvevents.Config {
	return &kvevents.Config{ZMQEndpoint: "ipc://" + t.TempDir() + "/events", TopicFilter: "kv@", Concurrency: workers}
}

// production returns a context with a logger as llm-d's router has it: trace is off.
func production(t testing.TB) context.Context {
	logger := zap.New(zap.WriteTo(io.Discard))
	log.SetLogger(logger) // for what has no context
	return log.IntoContext(t.Context(), logger)
}

// endpointsOf returns those of pods that publish under these names.
func endpointsOf(t testing.TB, pods ...string) []scheduling.Endpoint {
	t.Helper()
	var all []scheduling.Endpoint
	for _, pod := range pods {
		host, port, err := net.SplitHostPort(pod)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, scheduling.NewEndpoint(&datalayer.EndpointMetadata{
			NamespacedName: types.NamespacedName{Namespace: "default", Name: pod}, Address: host, Port: port,
		}, nil, nil))
	}
	return all
}

// An answer is what a scorer says of the pods: scores, and leading blocks.
type answer struct {
	scores map[string]float64
	blocks map[string]int
}

func (a answer) equal(b answer) bool {
	return maps.Equal(a.scores, b.scores) && maps.Equal(a.blocks, b.blocks)
}

// ask asks as llm-d's scheduler does, with token ids that its tokenizer plugin has left.
func (c contestant) ask(ctx context.Context, ids []uint32, model string, endpoints []scheduling.Endpoint) answer {
	cycle := scheduling.NewCycleState()
	cycle.Write(preparedata.TokenizedPromptStateKey, &preparedata.TokenizedPromptState{TokenIDs: ids})
	request := &scheduling.LLMRequest{RequestId: "request", TargetModel: model}
	found := answer{make(map[string]float64), make(map[string]int)}
	for endpoint, score := range c.Score(ctx, cycle, request, endpoints) {
		found.scores[endpoint.GetMetadata().NamespacedName.Name] = score
	}
	state, err := scheduling.ReadCycleStateKey[*prefix.SchedulingContextState](cycle, plugin.StateKey(c.TypedName().String()))
	if err == nil {
		for pod, blocks := range state.PrefixCacheServers {
			found.blocks[pod.Name] = blocks
		}
	}
	return found
}

// settle waits until all contestants have taken all events that were published. They have
// one worker each, so that events are taken in turn.
func settle(t testing.TB, to *publisher, tokens int, contestants ...contestant) {
	t.Helper()
	last := endpointsOf(t, lastPod)
	ids := make([]uint32, tokens)
	for i := range ids {
		ids[i] = rand.Uint32() | 1<<31 // no prompt has such ids
	}
	for end := time.Now().Add(deadline); ; time.Sleep(5 * time.Millisecond) {
		// Once more, as who is not connected yet has missed it.
		to.send(lastPod, to.stored(ids, 0, tokens, "GPU"))
		missing := 0
		for _, one := range contestants {
			if one.ask(t.Context(), ids, model, last).blocks[lastPod] == 0 {
				missing++
			}
		}
		if missing == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d scorers have not taken all events within %v", missing, deadline)
		}
	}
}

func start(t testing.TB) (*publisher, []contestant) {
	t.Helper()
	var all []contestant
	var endpoints []string
	for _, one := range kinds {
		made := one.make(t, 1<<16, 1, blockTokens)
		all = append(all, made)
		endpoints = append(endpoints, made.endpoint)
	}
	to := publish(t, endpoints...)
	settle(t, to, blockTokens, all...)
	return to, all
}

// TestScoresEqualUpstreams feeds llm-d's scorer and ours the same events of random
// workloads, with evictions and clears, and room for everything.
func TestScoresEqualUpstreams(t *testing.T) {
	const pods, rounds = 6, 40
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			to, contestants := start(t)
			to.asMaps = seed%2 == 1
			prompts := branches(random, 24)
			names := make([]string, pods)
			engines := make([]*pod, pods)
			for i := range pods {
				names[i] = fmt.Sprintf("10.0.0.%d:8000", i+1)
				engines[i] = newPod(names[i], to)
			}
			endpoints := endpointsOf(t, names...)
			apart := 0
			for range rounds {
				for range 10 {
					engines[random.IntN(pods)].act(random, prompts)
				}
				settle(t, to, blockTokens, contestants...)
				apart += compare(t, contestants, prompts, model, endpoints)
			}
			if apart < rounds {
				t.Errorf("pods differed in %d answers alone: the workload tells nothing", apart)
			}
		})
	}
}

// compare asks all for all prompts, and returns in how many answers pods had different
// scores that are not 0.
func compare(t *testing.T, contestants []contestant, prompts [][]uint32, model string, endpoints []scheduling.Endpoint) (apart int) {
	t.Helper()
	for _, prompt := range prompts {
		want := contestants[0].ask(t.Context(), prompt, model, endpoints)
		for i, one := range contestants[1:] {
			if got := one.ask(t.Context(), prompt, model, endpoints); !got.equal(want) {
				t.Fatalf("%s says %v, %s %v", kinds[0].name, want, kinds[i+1].name, got)
			}
		}
		different := map[int]bool{}
		for _, blocks := range want.blocks {
			different[blocks] = true
		}
		if len(different) > 1 {
			apart++
		}
	}
	return apart
}

// branches returns prompts of which many share a beginning.
func branches(random *rand.Rand, n int) [][]uint32 {
	prompts := make([][]uint32, n)
	for i := range prompts {
		if i > 0 {
			earlier := prompts[random.IntN(i)]
			prompts[i] = append(prompts[i], earlier[:random.IntN(len(earlier)+1)]...)
		}
		for range 1 + random.IntN(12*blockTokens) {
			prompts[i] = append(prompts[i], random.Uint32N(1000))
		}
	}
	return prompts
}

// TestEventsOfEveryReleaseLeadToEqualScores takes batches that vLLM's own releases made.
func TestEventsOfEveryReleaseLeadToEqualScores(t *testing.T) {
	text, err := os.ReadFile("../../cmd/kvindexd/events/testdata/messages.json")
	if err != nil {
		t.Fatal(err)
	}
	var releases map[string][]struct {
		Payload string
		Events  []struct {
			TokenIDs []uint32 `json:"token_ids"`
			LoRA     string   `json:"lora_name"`
		}
	}
	if err := json.Unmarshal(text, &releases); err != nil {
		t.Fatal(err)
	}
	const pod = "10.0.0.1:8000"
	endpoints := endpointsOf(t, pod)
	for release, messages := range releases {
		t.Run(release, func(t *testing.T) {
			to, contestants := start(t)
			held := 0
			for _, message := range messages {
				batch, err := hex.DecodeString(message.Payload)
				if err != nil {
					t.Fatal(err)
				}
				to.sendBatch(pod, batch)
				settle(t, to, blockTokens, contestants...)
				for _, event := range message.Events {
					for _, named := range []string{model, event.LoRA} {
						compare(t, contestants, [][]uint32{event.TokenIDs}, named, endpoints)
						held += contestants[0].ask(t.Context(), event.TokenIDs, named, endpoints).blocks[pod]
					}
				}
			}
			if held == 0 {
				t.Error("no event told of a block that was found")
			}
		})
	}
}
