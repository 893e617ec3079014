/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/cluster/etcd_lib.h"

#include <dlfcn.h>
#include <string.h>

#include "daemon/base/err.h"

#define LIBRARY "libcurl.so.4"
#define LIBRARY_GNUTLS "libcurl-gnutls.so.4" /* Debian's other one, as good */

static int etcd_lib_find(void *handle, const char *name, void *fn_p)
{
	void *fn = dlsym(handle, name);

	if (!fn)
		return err_raise(ERR_REQUIRE, "%s has no function %s", LIBRARY, name);
	memcpy(fn_p, &fn, sizeof(fn));
	return 0;
}

int etcd_lib_load(const struct etcd_lib **lib_p)
{
	static struct etcd_lib lib;
	static bool loaded;
	void *handle;
	int r;

	*lib_p = &lib;
	if (loaded)
		return 0;
	handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (!handle)
		handle = dlopen(LIBRARY_GNUTLS, RTLD_NOW | RTLD_LOCAL);
	if (!handle)
		return err_raise(ERR_REQUIRE,
				 "cluster: %s: install libcurl4, or name no etcd",
				 dlerror());
#define ETCD_LIB_FIND(fn)                        \
	r = etcd_lib_find(handle, #fn, &lib.fn); \
	if (r < 0)                               \
		return err_pass(r);
	ETCD_LIB_FUNCTIONS(ETCD_LIB_FIND)
#undef ETCD_LIB_FIND
	if (lib.curl_global_init(CURL_GLOBAL_ALL) != CURLE_OK)
		return err_raise(ERR_REQUIRE, "cluster: %s: it does not start", LIBRARY);
	loaded = true;
	return 0;
}
