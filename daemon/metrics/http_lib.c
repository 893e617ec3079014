/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/metrics/http_lib.h"

#include "daemon/base/err.h"
#include "daemon/base/library.h"
#include "daemon/base/mem.h"

static struct http_lib lib;

#define HTTP_LIB_FUNCTION(fn) {#fn, &lib.fn, false},
static const struct library_function functions[] = {
	HTTP_LIB_FUNCTIONS(HTTP_LIB_FUNCTION)};

int http_lib_load(const struct http_lib **lib_p)
{
	int r = library_load("libmicrohttpd.so.12", functions, ARRAY_LEN(functions));

	*lib_p = &lib;
	return err_prefix(r, "metrics_listen: install libmicrohttpd12, or leave the "
			     "option empty");
}
