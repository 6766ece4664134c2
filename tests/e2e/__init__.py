# SPDX-License-Identifier: Apache-2.0
# A package, so that what its tests share is stopped before the next folder's tests.
