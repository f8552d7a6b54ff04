/* A stand-in for libnvidia-ml.so.1, compiled against NVIDIA's own nvml.h. Its state is read anew on each call from the file
 * NVML_STAND_IN_STATE, a line a value:
 *   init 9, err 999, driver 570, count 8           error of nvmlInit and of every other call; major version; number of GPUs
 *   gpu1.lost 1, gpu1.lost 2                       its metrics, or even its handle, answer GPU_IS_LOST
 *   gpu0.handle 16, gpu0.err 999, gpu0.err.power 10    error of its handle, of all its metrics, of one of them
 *   init.hang 1, gpu0.hang 1, gpu0.hang.ecc 1      calls that never return
 *   gpu0.ecc 3, gpu0.links 4, gpu0.link2.down 1, ...   values: see below; gpu0.uuid 7 makes it GPU-00000007
 * Xids are lines "GPU XID" in the file of that name with ".events": each is delivered once, when it appears.
 * Without -DWITH_REMAPPED_ROWS the library lacks nvmlDeviceGetRemappedRows, without -DWITH_EVENTS the event sets, like an
 * old driver's.
 */
#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 8

static int identity[MAX_GPUS] = {0, 1, 2, 3, 4, 5, 6, 7};

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

static void hang(void) {
    for (;;) pause();
}

static nvmlReturn_t of_library(void) { return (nvmlReturn_t)look_up("err", NVML_SUCCESS); }

/* What a query of `what` meets: the loss of the GPU, an error that the state asks for, or nothing. */
static nvmlReturn_t meets(nvmlDevice_t device, const char *what) {
    char key[64];
    int gpu = *(int *)device;
    snprintf(key, sizeof key, "hang.%s", what);
    if (of_gpu(gpu, "hang", 0) || of_gpu(gpu, key, 0)) hang();
    if (of_library() != NVML_SUCCESS) return of_library();
    snprintf(key, sizeof key, "err.%s", what);
    return of_gpu(gpu, "lost", 0) ? NVML_ERROR_GPU_IS_LOST : (nvmlReturn_t)of_gpu(gpu, key, of_gpu(gpu, "err", NVML_SUCCESS));
}

#define QUERY(what, assignment)                        \
    nvmlReturn_t met = meets(device, what);            \
    int gpu = *(int *)device;                          \
    (void)gpu;                                         \
    if (met == NVML_SUCCESS) { assignment; }           \
    return met

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    if (look_up("init.hang", 0)) hang();
    return (nvmlReturn_t)look_up("init", NVML_SUCCESS);
}
EXPORT nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }
EXPORT const char *nvmlErrorString(nvmlReturn_t result) { (void)result; return "an error of the stand-in"; }

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    snprintf(version, length, "%lld.104.05", look_up("driver", 580));
    return of_library();
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = (unsigned int)look_up("count", 2);
    return of_library();
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= look_up("count", 2)) return NVML_ERROR_INVALID_ARGUMENT;
    *device = (nvmlDevice_t)&identity[index];
    if (of_library() != NVML_SUCCESS) return of_library();
    if (of_gpu((int)index, "lost", 0) == 2) return NVML_ERROR_GPU_IS_LOST;
    return (nvmlReturn_t)of_gpu((int)index, "handle", NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    QUERY("uuid", snprintf(uuid, length, "GPU-%08lld", of_gpu(gpu, "uuid", gpu)));
}
EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    QUERY("name", snprintf(name, length, "Stand-in H200"));
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius) {
    (void)sensor;
    QUERY("temperature", *celsius = (unsigned int)of_gpu(gpu, "temperature", 40));
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t threshold,
                                                      unsigned int *celsius) {
    QUERY("limit", *celsius = threshold == NVML_TEMPERATURE_THRESHOLD_GPU_MAX ? (unsigned int)of_gpu(gpu, "limit", 87) : 999);
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    QUERY("power", *milliwatts = (unsigned int)of_gpu(gpu, "power", 350500));
}
EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    QUERY("power_limit", *milliwatts = (unsigned int)of_gpu(gpu, "power_limit", 700000));
}
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    QUERY("utilization", rates->gpu = (unsigned int)of_gpu(gpu, "utilization", 75); rates->memory = 10);
}
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    QUERY("memory", memory->total = 1ULL << 37; memory->used = 1ULL << 36; memory->free = 1ULL << 36);
}
EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    QUERY("mig", *current = (unsigned int)of_gpu(gpu, "mig", 0); *pending = *current);
}
EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                                unsigned long long *count) {
    const char *what = counter == NVML_VOLATILE_ECC ? "ecc" : "ecc_aggregate";
    QUERY(what, *count = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED ? (unsigned long long)of_gpu(gpu, what, 0) : 999);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    QUERY("throttle", *reasons = (unsigned long long)of_gpu(gpu, "throttle", 1));
}

/* "links" NVLinks, none by default. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active) {
    char key[64];
    long long links = of_gpu(*(int *)device, "links", 0);
    snprintf(key, sizeof key, "link%u.down", link);
    if (link >= links) return links ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    QUERY("link", *active = of_gpu(gpu, key, 0) ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED);
}

static void answer_field(int gpu, nvmlFieldValue_t *field) {
    struct { unsigned int id; const char *what; } known[] = {
        {NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, "crc_flit"},  {NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, "crc_data"},
        {NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, "replays"},     {NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, "recoveries"},
        {NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, "link.errors"},         {NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, "link.recoveries"},
        {NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, "action"},
    };
    field->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].id == field->fieldId) {
            /* what is not in the state is not supported, so that absence is told from 0 */
            long long value = of_gpu(gpu, known[i].what, -1);
            field->nvmlReturn = value < 0 ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
            field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
            field->value.ullVal = (unsigned long long)value;
        }
}
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    QUERY("fields", for (int i = 0; i < count; i++) answer_field(gpu, &values[i]));
}

#ifdef WITH_REMAPPED_ROWS
EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                              unsigned int *pending, unsigned int *failure) {
    QUERY("remap", *corrected = 0; *uncorrected = 1; *pending = (unsigned int)of_gpu(gpu, "pending", 0);
          *failure = (unsigned int)of_gpu(gpu, "failure", 0));
}
#endif

#ifdef WITH_EVENTS
static unsigned long long wanted[MAX_GPUS];
static int delivered;

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) { *set = (nvmlEventSet_t)wanted; return of_library(); }
EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    (void)set;
    QUERY("events", wanted[gpu] = types);
}

static int next_event(unsigned int *gpu, unsigned long long *xid) {
    char path[4096];
    int found = 0;
    snprintf(path, sizeof path, "%s.events", getenv("NVML_STAND_IN_STATE"));
    FILE *file = fopen(path, "r");
    for (int i = 0; file && i <= delivered; i++) found = fscanf(file, "%u %llu", gpu, xid) == 2;
    if (file) fclose(file);
    delivered += found;
    return found;
}
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *event, unsigned int timeout_ms) {
    (void)set;
    for (unsigned int waited_ms = 0; waited_ms < timeout_ms; waited_ms += 5, usleep(5000)) {
        unsigned int gpu;
        unsigned long long xid;
        if (!next_event(&gpu, &xid) || gpu >= MAX_GPUS || !(wanted[gpu] & nvmlEventTypeXidCriticalError)) continue;
        memset(event, 0, sizeof *event);
        event->device = (nvmlDevice_t)&identity[gpu];
        event->eventType = nvmlEventTypeXidCriticalError;
        event->eventData = xid;
        return NVML_SUCCESS;
    }
    return NVML_ERROR_TIMEOUT;
}
#endif
