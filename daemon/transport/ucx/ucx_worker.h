/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx_worker: libucp's worker, and its thread.
 *
 * All else of the ucx backend is the loop's. A request to libucp is a call: its `start`
 * runs on the thread, its `done` on the loop when libucp has given it back. Calls start
 * in the order of submission, and what libucp reports comes to the loop in its order.
 * One call never waits for another.
 */
#ifndef KVD_TRANSPORT_UCX_WORKER_H
#define KVD_TRANSPORT_UCX_WORKER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/mailbox.h"
#include "daemon/transport/ucx/ucx_lib.h"

struct ucx_worker;

/* Embedded in its owner, which stays until it is done; used again from then on. */
struct ucx_call {
	struct list link;
	struct ucx_worker *worker;
	/* Asks libucp; ucx_call_over() follows, at once or out of a callback. */
	void (*start)(struct ucx_call *call);
	void (*done)(struct ucx_call *call); /* loop's thread */
	uint64_t bytes;			     /* that it may have libucp move */
	ucs_status_t status;
	size_t length; /* received */
};

struct ucx_worker {
	const struct ucx_lib *lib;
	ucp_worker_h handle;
	int efd; /* libucp's */
	struct mailbox box;
	/* the loop's */
	struct loop *loop;
	struct loop_defer submitted; /* a call since the thread was last woken */
	/* the thread's */
	unsigned int open;    /* calls inside libucp */
	uint64_t open_bytes;  /* theirs */
	unsigned int closing; /* endpoints */
	int close_ms;	      /* to the next look at endpoints that close */
	unsigned int looks;   /* in a row that found nothing */
	bool told;	      /* the loop is to be woken after this round */
	/* under the lock */
	pthread_mutex_t lock;
	struct list calls; /* for the thread to start */
	bool asleep, stopping;
	pthread_t thread;
	bool started;
	int event_fd; /* wakes the thread */
};

/* Loop's thread. `worker` is zeroed; closing one that did not open is fine. */
int ucx_worker_open(struct ucx_worker *worker, const struct ucx_lib *lib,
		    ucp_context_h context, struct loop *loop);
/* Starts the thread, which alone uses worker->handle from then on. */
int ucx_worker_run(struct ucx_worker *worker);
/* No call is under way. */
void ucx_worker_close(struct ucx_worker *worker);
void ucx_submit(struct ucx_worker *worker, struct ucx_call *call);
/* Wake the thread for what was submitted; else that is done in the next turn. */
void ucx_submitted(struct ucx_worker *worker);

/* ---- for the thread: `start`, and callbacks of libucp ---- */
void ucx_call_over(struct ucx_call *call, ucs_status_t status, size_t length);
/* With what ucp_*_nbx gave: over, unless the callback comes. */
void ucx_call_began(struct ucx_call *call, ucs_status_ptr_t ptr, size_t length);
/* For ucp_request_param_t.cb; user_data is the call. */
void ucx_on_sent(void *request, ucs_status_t status, void *user_data);
void ucx_on_received(void *request, ucs_status_t status, size_t length, void *user_data);
/* Only `done` of it: something happened. Nothing while it is on its way there. */
void ucx_tell(struct ucx_worker *worker, struct ucx_call *call);

#endif
