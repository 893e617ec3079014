/* SPDX-License-Identifier: Apache-2.0 */
/* etcd_lib: libcurl as a table of functions, loaded when the cluster is etcd's: it loads
 * some thirty other libraries, which other daemons do not need. */
#ifndef KVD_CLUSTER_ETCD_LIB_H
#define KVD_CLUSTER_ETCD_LIB_H

#define CURL_DISABLE_TYPECHECK
#include <curl/curl.h>

#define ETCD_LIB_FUNCTIONS(X)       \
	X(curl_global_init)         \
	X(curl_easy_init)           \
	X(curl_easy_cleanup)        \
	X(curl_easy_setopt)         \
	X(curl_easy_getinfo)        \
	X(curl_easy_strerror)       \
	X(curl_slist_append)        \
	X(curl_slist_free_all)      \
	X(curl_multi_init)          \
	X(curl_multi_cleanup)       \
	X(curl_multi_setopt)        \
	X(curl_multi_add_handle)    \
	X(curl_multi_remove_handle) \
	X(curl_multi_socket_action) \
	X(curl_multi_info_read)     \
	X(curl_multi_assign)        \
	X(curl_multi_strerror)

struct etcd_lib {
#define ETCD_LIB_MEMBER(fn) __typeof__(&(fn)) fn;
	ETCD_LIB_FUNCTIONS(ETCD_LIB_MEMBER)
#undef ETCD_LIB_MEMBER
};

/* ERR_REQUIRE names the missing library. Once loaded it stays. */
int etcd_lib_load(const struct etcd_lib **lib_p);

#endif
