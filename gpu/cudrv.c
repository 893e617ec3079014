/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver's symbols are taken by the names that carry their version
 * (cuMemGetInfo_v2), never by the plain ones: those are the ABI of CUDA 3 for
 * some, and for cuMemcpyBatchAsync the one of 12.8, which had a failIdx
 * parameter that 13.0 took away. A driver that has only the plain name is a
 * driver without that feature.
 *
 * The driver does not report which results end a context permanently; the list follows
 * cuda.h, which states for each "leaves the process in an inconsistent state" or "the
 * context cannot be used".
 */
#include "gpu/cudrv.h"

#include <assert.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"

const char *cudrv_group_name(enum cudrv_group group)
{
	static const char *const names[CUDRV_GROUPS] = {"vmm",	"batch",  "copy3d",
							"peer", "dmabuf", "kernels"};

	assert(group < CUDRV_GROUPS);
	return names[group];
}

bool cudrv_sticky(int result)
{
	switch (result) {
	case CU_ERROR_DEINITIALIZED:
	case CU_ERROR_DEVICE_UNAVAILABLE:
	case CU_ERROR_ECC_UNCORRECTABLE:
	case CU_ERROR_NVLINK_UNCORRECTABLE:
	case CU_ERROR_CONTAINED: /* another GPU's memory, lost during an access by NVLink
				  */
	case CU_ERROR_ILLEGAL_ADDRESS:
	case CU_ERROR_CONTEXT_IS_DESTROYED:
	case CU_ERROR_LAUNCH_FAILED:
	case CU_ERROR_MPS_CLIENT_TERMINATED:
	case 702: /* launch timeout */
	case 710: /* assert in a kernel */
	case 721: /* tensor memory */
	case 911: /* a device outside CUDA */
		return true;
	}
	/* hardware stack, illegal instruction, misaligned address, address space,
	 * program counter */
	return result >= CU_ERROR_HARDWARE_STACK_ERROR && result <= CU_ERROR_INVALID_PC;
}

static enum err_code result_code(int result, enum err_code other)
{
	if (result == CU_ERROR_OUT_OF_MEMORY)
		return ERR_NOMEM;
	if (result == CU_ERROR_NO_DEVICE || result == CU_ERROR_NOT_INITIALIZED)
		return ERR_REQUIRE;
	return cudrv_sticky(result) ? ERR_IO : other;
}

int cudrv_raise(const struct cudrv *drv, int result, enum err_code code, const char *fmt,
		...)
{
	const char *name = NULL, *text = NULL;
	char message[ERR_TEXT_MAX];
	va_list args;

	va_start(args, fmt);
	vsnprintf(message, sizeof(message), fmt, args);
	va_end(args);
	if (drv->error_name(result, &name) != CU_SUCCESS || !name)
		name = "CUDA error";
	if (drv->error_string(result, &text) != CU_SUCCESS || !text)
		text = "unknown to this driver";
	return err_raise(result_code(result, code), "%.200s: %.48s (%d, %.60s)", message,
			 name, result, text);
}

/* ---- loading ---- */

struct symbol {
	const char *name;
	size_t field; /* offset in struct cudrv */
	int group;    /* -1: required */
};

static const struct symbol symbols[] = {
#define CUDRV_SYMBOL(function, symbol, parameters) \
	{#symbol, offsetof(struct cudrv, function), -1},
#define CUDRV_GROUP_SYMBOL(group, function, symbol, parameters) \
	{#symbol, offsetof(struct cudrv, function), CUDRV_##group},
	CUDRV_REQUIRED(CUDRV_SYMBOL) CUDRV_OPTIONAL(CUDRV_GROUP_SYMBOL)};

static int symbols_take(struct cudrv *drv, const char *path)
{
	for (size_t i = 0; i < CUDRV_GROUPS; i++)
		drv->has[i] = true;
	for (size_t i = 0; i < ARRAY_LEN(symbols); i++) {
		const struct symbol *s = &symbols[i];
		void *address = dlsym(drv->library, s->name);

		memcpy((char *)drv + s->field, &address, sizeof(address));
		if (address)
			continue;
		if (s->group < 0)
			return err_raise(ERR_REQUIRE,
					 "%s has no %s: the driver is too old for kvd",
					 path, s->name);
		if (drv->has[s->group])
			drv->missing[s->group] = s->name;
		drv->has[s->group] = false;
	}
	return 0;
}

int cudrv_load(const char *path, struct cudrv *drv)
{
	int r, result;

	*drv = (struct cudrv){0};
	drv->library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
	if (!drv->library)
		return err_raise(ERR_REQUIRE, "no CUDA driver: %s", dlerror());
	r = symbols_take(drv, path);
	if (r < 0)
		return err_pass(r);
	result = drv->init(0);
	if (result != CU_SUCCESS)
		return cudrv_raise(drv, result, ERR_REQUIRE, "cuInit");
	result = drv->driver_version(&drv->version);
	if (result != CU_SUCCESS)
		return cudrv_raise(drv, result, ERR_REQUIRE, "cuDriverGetVersion");
	return 0;
}

/* ---- names ---- */

void cudrv_uuid_text(const struct cu_uuid *uuid, char text[CUDRV_UUID_TEXT])
{
	memcpy(text, "GPU-", sizeof("GPU-"));
	uuid_write(uuid->bytes, text + 4);
}

bool cudrv_uuid_parse(const char *text, struct cu_uuid *uuid_p)
{
	return uuid_read(strncmp(text, "GPU-", 4) == 0 ? text + 4 : text, uuid_p->bytes);
}
