/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/library.h"

#include <dlfcn.h>
#include <string.h>

#include "daemon/base/err.h"

int library_load(const char *path, const struct library_function *functions, size_t count)
{
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!handle)
		return err_raise(ERR_REQUIRE, "%s", dlerror());
	for (size_t i = 0; i < count; i++) {
		/* the default version matches the headers */
		void *fn = dlsym(handle, functions[i].name);

		if (!fn && !functions[i].optional)
			return err_raise(ERR_REQUIRE, "%s has no function %s", path,
					 functions[i].name);
		memcpy(functions[i].fn_p, &fn, sizeof(fn));
	}
	return 0;
}
