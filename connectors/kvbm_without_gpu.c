/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's driver as far as KVBM 1.6.1 calls it, on a machine without a GPU: memory is
   the host's, all other work is over at once and copies nothing. */

#include <stdlib.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, PAGE = 4096 };

static char object;

static int made(void **out) {
    *out = &object;
    return SUCCESS;
}

#define OVER(name) \
    int name(void) { return SUCCESS; }
#define MAKES(name) \
    int name(void **out) { return made(out); }

OVER(cuInit)
OVER(cuCtxDestroy_v2)
OVER(cuCtxSetCurrent)
OVER(cuCtxSynchronize)
OVER(cuDevicePrimaryCtxRelease_v2)
OVER(cuEventDestroy_v2)
OVER(cuEventRecord)
OVER(cuEventSynchronize)
OVER(cuLaunchKernel)
OVER(cuMemcpyDtoHAsync_v2)
OVER(cuMemcpyHtoDAsync_v2)
OVER(cuMemPoolDestroy)
OVER(cuMemPoolSetAttribute)
OVER(cuStreamDestroy_v2)
OVER(cuStreamSynchronize)

MAKES(cuCtxGetCurrent)
MAKES(cuDevicePrimaryCtxRetain)
MAKES(cuEventCreate)
MAKES(cuMemPoolCreate)
MAKES(cuModuleGetFunction)
MAKES(cuModuleLoadData)
MAKES(cuStreamCreate)

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value) {
    *value = 0;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    *text = "there is no GPU";
    return SUCCESS;
}

int cuMemHostAlloc(void **out, size_t bytes) {
    *out = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemAllocFromPoolAsync(void **out, size_t bytes) {
    return cuMemHostAlloc(out, bytes);
}

int cuMemFreeHost(void *memory) {
    free(memory);
    return SUCCESS;
}

int cuMemFreeAsync(void *memory) { return cuMemFreeHost(memory); }

int cuMemFree_v2(void *memory) { return cuMemFreeHost(memory); }

/* nixlAgent::createBackend, registerMem and deregisterMem: UCX would see that no memory
   is a GPU's, and its thread would take a core. */
int _ZN9nixlAgent13createBackendERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt13unordered_mapIS5_S5_St4hashIS5_ESt8equal_toIS5_ESaISt4pairIS6_S5_EEERP12nixlBackendH(
    void *agent, void *type, void *parameters, void **out) {
    return made(out);
}
OVER(_ZN9nixlAgent11registerMemERK12nixlDescListI12nixlBlobDescEPK21nixlAgentOptionalArgs)
OVER(_ZN9nixlAgent13deregisterMemERK12nixlDescListI12nixlBlobDescEPK21nixlAgentOptionalArgs)
