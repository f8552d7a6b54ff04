/* A stand-in for libnvidia-ml.so.1, compiled against NVIDIA's own nvml.h: two GPUs, whose state is read anew on each call
 * from the file NVML_STAND_IN_STATE, a line a value: "gpu1.lost 1", "gpu0.ecc 3", "gpu0.err.power 10", "gpu0.hang 1", "init 9".
 * Without -DWITH_REMAPPED_ROWS the library lacks nvmlDeviceGetRemappedRows, like an old driver's.
 */
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NUM_GPUS 2

static int identity[NUM_GPUS] = {0, 1};

static long long look_up(const char *key, long long fallback) {
    const char *path = getenv("NVML_STAND_IN_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char name[64];
    long long value;
    while (file && fscanf(file, "%63s %lld", name, &value) == 2)
        if (strcmp(name, key) == 0) fallback = value;
    if (file) fclose(file);
    return fallback;
}

static long long of_gpu(int gpu, const char *what, long long fallback) {
    char key[64];
    snprintf(key, sizeof key, "gpu%d.%s", gpu, what);
    return look_up(key, fallback);
}

/* What a query of `what` meets: the loss of the GPU, an error that the state asks for, or nothing. */
static nvmlReturn_t meets(nvmlDevice_t device, const char *what) {
    char error[64];
    int gpu = *(int *)device;
    snprintf(error, sizeof error, "err.%s", what);
    if (of_gpu(gpu, "hang", 0))
        for (;;) pause();
    return of_gpu(gpu, "lost", 0) ? NVML_ERROR_GPU_IS_LOST : (nvmlReturn_t)of_gpu(gpu, error, NVML_SUCCESS);
}

#define QUERY(what, assignment)                        \
    nvmlReturn_t met = meets(device, what);            \
    int gpu = *(int *)device;                          \
    (void)gpu;                                         \
    if (met == NVML_SUCCESS) { assignment; }           \
    return met

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return (nvmlReturn_t)look_up("init", NVML_SUCCESS); }
EXPORT nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }
EXPORT const char *nvmlErrorString(nvmlReturn_t result) { (void)result; return "an error of the stand-in"; }

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) { *count = NUM_GPUS; return NVML_SUCCESS; }

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= NUM_GPUS) return NVML_ERROR_INVALID_ARGUMENT;
    *device = (nvmlDevice_t)&identity[index];
    return of_gpu((int)index, "lost", 0) == 2 ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    QUERY("uuid", snprintf(uuid, length, "GPU-0000000%d", gpu));
}
EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    QUERY("name", snprintf(name, length, "Stand-in H200"));
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) {
    (void)sensor;
    QUERY("temperature", *celsius = (unsigned int)of_gpu(gpu, "temperature", 40));
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    QUERY("power", *milliwatts = (unsigned int)of_gpu(gpu, "power", 350500));
}
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    QUERY("utilization", rates->gpu = (unsigned int)of_gpu(gpu, "utilization", 75); rates->memory = 10);
}
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    QUERY("memory", memory->total = 1ULL << 37; memory->used = 1ULL << 36; memory->free = 1ULL << 36);
}
EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                                unsigned long long *count) {
    int asked_for = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED && counter == NVML_VOLATILE_ECC;
    QUERY("ecc", *count = asked_for ? (unsigned long long)of_gpu(gpu, "ecc", 0) : 999);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    QUERY("throttle", *reasons = (unsigned long long)of_gpu(gpu, "throttle", 1));
}
#ifdef WITH_REMAPPED_ROWS
EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                              unsigned int *pending, unsigned int *failure) {
    QUERY("remap", *corrected = 0; *uncorrected = 1; *pending = (unsigned int)of_gpu(gpu, "pending", 0);
          *failure = (unsigned int)of_gpu(gpu, "failure", 0));
}
#endif
