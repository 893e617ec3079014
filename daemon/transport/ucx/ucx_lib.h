/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx_lib: libucp as a table of functions, loaded when the ucx backend opens.
 *
 * Loaded with dlopen because the library reads part of its configuration in its
 * constructors (so the environment must be right before), because a daemon that
 * does not use UCX should not carry it, and because the operator may choose
 * another build (`ucx_library`). Headers of 1.13 fit any later 1.x: structures
 * carry field masks.
 *
 * Only the ucx_*.c files include this header.
 */
#ifndef KVD_TRANSPORT_UCX_LIB_H
#define KVD_TRANSPORT_UCX_LIB_H

#include <stdbool.h>
#include <ucp/api/ucp.h>

/* X(function): all are required, and exist since 1.13. */
#define UCX_LIB_FUNCTIONS(X)              \
	X(ucp_get_version_string)         \
	X(ucp_lib_query)                  \
	X(ucp_config_read)                \
	X(ucp_config_modify)              \
	X(ucp_config_release)             \
	X(ucp_init_version)               \
	X(ucp_cleanup)                    \
	X(ucp_mem_map)                    \
	X(ucp_mem_unmap)                  \
	X(ucp_worker_create)              \
	X(ucp_worker_destroy)             \
	X(ucp_worker_query)               \
	X(ucp_worker_release_address)     \
	X(ucp_worker_get_efd)             \
	X(ucp_worker_arm)                 \
	X(ucp_worker_progress)            \
	X(ucp_worker_set_am_recv_handler) \
	X(ucp_ep_create)                  \
	X(ucp_ep_close_nbx)               \
	X(ucp_ep_flush_nbx)               \
	X(ucp_ep_print_info)              \
	X(ucp_am_send_nbx)                \
	X(ucp_am_recv_data_nbx)           \
	X(ucp_am_data_release)            \
	X(ucp_request_free)

struct ucx_lib {
#define UCX_LIB_MEMBER(fn) __typeof__(&(fn)) fn;
	UCX_LIB_FUNCTIONS(UCX_LIB_MEMBER)
#undef UCX_LIB_MEMBER
	const char *(*ucs_status_string)(ucs_status_t status);
	const char *version; /* "1.13.1" */
	bool threads;	     /* built so that mem_map may run concurrently with the
			      * worker */
};

/*
 * Load `library` (NULL or "": libucp.so.0 of the system), once per process: requesting
 * another one later is ERR_STATE. ERR_REQUIRE names the missing part. First replaces this
 * process's environment with a new one, with UCX_* variables: safe with concurrent
 * readers; one thread at a time, and no concurrent writer.
 */
int ucx_lib_load(const char *library, const struct ucx_lib **lib_p);

#endif
