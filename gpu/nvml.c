/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/nvml.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"

#define NVML_NOT_SUPPORTED 3

static int nvml_raise(const struct nvml *nvml, int result, const char *call)
{
	const char *text = nvml->error_string(result);

	return err_raise(ERR_IO, "%s: %s (%d)", call, text ? text : "unknown", result);
}

static int nvml_symbols(struct nvml *nvml, int (**init_p)(void))
{
	const struct {
		const char *name;
		void *at;
	} symbols[] = {
		{"nvmlInit_v2", init_p},
		{"nvmlShutdown", &nvml->shutdown},
		{"nvmlErrorString", &nvml->error_string},
		{"nvmlDeviceGetHandleByUUID", &nvml->by_uuid},
		{"nvmlDeviceGetUtilizationRates", &nvml->rates},
		{"nvmlDeviceGetMemoryInfo", &nvml->memory},
	};

	for (size_t i = 0; i < ARRAY_LEN(symbols); i++) {
		void *address = dlsym(nvml->library, symbols[i].name);

		if (!address)
			return err_raise(ERR_REQUIRE, NVML_LIBRARY " has no %s",
					 symbols[i].name);
		memcpy(symbols[i].at, &address, sizeof(address));
	}
	return 0;
}

static int nvml_begin(struct nvml *nvml)
{
	int (*init)(void);
	int r = nvml_symbols(nvml, &init);

	if (r < 0)
		return err_pass(r);
	r = init();
	if (r != 0)
		return err_raise(ERR_REQUIRE, "nvmlInit: %s (%d)", nvml->error_string(r),
				 r);
	return 0;
}

int nvml_load(const char *driver, struct nvml *nvml)
{
	const char *slash = strrchr(driver, '/');
	char path[512];
	int r;

	*nvml = (struct nvml){0};
	snprintf(path, sizeof(path), "%.*s" NVML_LIBRARY,
		 slash ? (int)(slash - driver + 1) : 0, driver);
	nvml->library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (!nvml->library)
		return err_raise(ERR_REQUIRE, "no NVML: %s", dlerror());
	r = nvml_begin(nvml);
	if (r < 0) {
		dlclose(nvml->library);
		nvml->library = NULL;
	}
	return err_pass(r);
}

void nvml_unload(struct nvml *nvml)
{
	if (!nvml->library)
		return;
	nvml->shutdown();
	dlclose(nvml->library);
	nvml->library = NULL;
}

int nvml_read(const struct nvml *nvml, const char *uuid, struct nvml_use *use_p)
{
	unsigned long long bytes[3]; /* total, free, used */
	unsigned int rates[2];	     /* percent: kernels, memory */
	void *device;
	int r = nvml->by_uuid(uuid, &device);

	if (r != 0)
		return nvml_raise(nvml, r, "nvmlDeviceGetHandleByUUID");
	r = nvml->memory(device, bytes);
	if (r != 0)
		return nvml_raise(nvml, r, "nvmlDeviceGetMemoryInfo");
	r = nvml->rates(device, rates);
	if (r != 0 && r != NVML_NOT_SUPPORTED)
		return nvml_raise(nvml, r, "nvmlDeviceGetUtilizationRates");
	use_p->busy = r == 0 ? (rates[0] > 100 ? 100 : rates[0]) / 100.0 : -1;
	use_p->total = bytes[0];
	use_p->used = bytes[2];
	return 0;
}
