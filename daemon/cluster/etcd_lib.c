/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/cluster/etcd_lib.h"

#include "daemon/base/err.h"
#include "daemon/base/library.h"
#include "daemon/base/mem.h"

#define LIBRARY "libcurl.so.4"
#define LIBRARY_GNUTLS "libcurl-gnutls.so.4" /* Debian's other one, as good */

static struct etcd_lib lib;

#define ETCD_LIB_FUNCTION(fn) {#fn, &lib.fn, false},
static const struct library_function functions[] = {
	ETCD_LIB_FUNCTIONS(ETCD_LIB_FUNCTION)};

int etcd_lib_load(const struct etcd_lib **lib_p)
{
	static bool loaded;
	int r;

	*lib_p = &lib;
	if (loaded)
		return 0;
	r = library_load(LIBRARY, functions, ARRAY_LEN(functions));
	if (r < 0)
		r = library_load(LIBRARY_GNUTLS, functions, ARRAY_LEN(functions));
	if (r < 0)
		return err_prefix(r, "cluster: install libcurl4, or configure a "
				     "directory other than etcd");
	if (lib.curl_global_init(CURL_GLOBAL_ALL) != CURLE_OK)
		return err_raise(ERR_REQUIRE, "cluster: %s: initialization failed",
				 LIBRARY);
	loaded = true;
	return 0;
}
