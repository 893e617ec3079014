/* SPDX-License-Identifier: Apache-2.0 */
/* An NVML of two devices: one of which a part tells no rates, as with MIG. */
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static const char *const uuids[] = {"GPU-00000000-0000-0000-0000-000000000001",
				    "GPU-00000000-0000-0000-0000-000000000002"};
static int begun;

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT const char *nvmlErrorString(int result);
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device_p);
EXPORT int nvmlDeviceGetUtilizationRates(void *device, unsigned int rates[2]);
EXPORT int nvmlDeviceGetMemoryInfo(void *device, unsigned long long bytes[3]);

int nvmlInit_v2(void)
{
	begun++;
	return 0;
}

int nvmlShutdown(void)
{
	return begun-- > 0 ? 0 : 1;
}

const char *nvmlErrorString(int result)
{
	return result == 6 ? "Not Found" : "Unknown Error";
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device_p)
{
	if (begun <= 0)
		return 1;
	for (size_t i = 0; i < sizeof(uuids) / sizeof(uuids[0]); i++) {
		if (strcmp(uuid, uuids[i]) == 0) {
			*device_p = (void *)&uuids[i];
			return 0;
		}
	}
	return 6;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned int rates[2])
{
	if (device == &uuids[1])
		return 3;
	rates[0] = 93;
	rates[1] = 40;
	return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long bytes[3])
{
	(void)device;
	bytes[0] = 80000000000ULL;
	bytes[1] = 9000000000ULL;
	bytes[2] = 71000000000ULL;
	return 0;
}
