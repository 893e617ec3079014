/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/metrics/http_lib.h"

#include <dlfcn.h>
#include <string.h>

#include "daemon/base/err.h"

#define LIBRARY "libmicrohttpd.so.12"

static int http_lib_find(void *handle, const char *name, void *fn_p)
{
	void *fn = dlsym(handle, name);

	if (!fn)
		return err_raise(ERR_REQUIRE, "%s has no function %s", LIBRARY, name);
	memcpy(fn_p, &fn, sizeof(fn));
	return 0;
}

int http_lib_load(const struct http_lib **lib_p)
{
	static struct http_lib lib;
	void *handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	int r;

	if (!handle)
		return err_raise(ERR_REQUIRE,
				 "metrics_listen: %s: install libmicrohttpd12, or leave "
				 "the option empty",
				 dlerror());
#define HTTP_LIB_FIND(fn)                        \
	r = http_lib_find(handle, #fn, &lib.fn); \
	if (r < 0)                               \
		return err_pass(r);
	HTTP_LIB_FUNCTIONS(HTTP_LIB_FIND)
#undef HTTP_LIB_FIND
	*lib_p = &lib;
	return 0;
}
