/* SPDX-License-Identifier: Apache-2.0 */
/* http_lib: libmicrohttpd as a table of functions, loaded when a metrics endpoint is
 * configured: it depends on libgnutls, which other daemons should not load. */
#ifndef KVD_METRICS_HTTP_LIB_H
#define KVD_METRICS_HTTP_LIB_H

#include <microhttpd.h>

#define HTTP_LIB_FUNCTIONS(X)              \
	X(MHD_start_daemon)                \
	X(MHD_stop_daemon)                 \
	X(MHD_create_response_from_buffer) \
	X(MHD_add_response_header)         \
	X(MHD_destroy_response)            \
	X(MHD_queue_response)              \
	X(MHD_get_connection_info)

struct http_lib {
#define HTTP_LIB_MEMBER(fn) __typeof__(&(fn)) fn;
	HTTP_LIB_FUNCTIONS(HTTP_LIB_MEMBER)
#undef HTTP_LIB_MEMBER
};

/* ERR_REQUIRE names the missing part. Once loaded it stays. */
int http_lib_load(const struct http_lib **lib_p);

#endif
