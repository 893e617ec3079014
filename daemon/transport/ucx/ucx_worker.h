/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx_worker: libucp's worker, and its holder.
 *
 * The rest of the ucx backend runs on the loop. A request to libucp is a call: its
 * `start` runs on the worker's holder, its `done` on the loop when libucp has returned
 * it. Calls start in the order of submission, and libucp's reports reach the loop in
 * their order. One call never waits for another.
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
	/* Calls libucp; ucx_call_over() follows, at once or from a callback. */
	void (*start)(struct ucx_call *call);
	void (*done)(struct ucx_call *call); /* loop's thread */
	uint64_t bytes;			     /* that it may have libucp move */
	bool heavy; /* connects, closes, or has much behind it: not on the loop */
	ucs_status_t status;
	size_t length; /* received */
};

struct ucx_worker {
	const struct ucx_lib *lib;
	ucp_worker_h handle;
	int efd; /* libucp's */
	struct mailbox box;
	/* the loop's */
	struct loop_fd watch;	     /* of efd, while the loop has the worker */
	uint64_t bytes;		     /* of calls that are not done */
	bool away;		     /* the thread has it */
	struct loop_defer submitted; /* a call since the thread was last woken */
	/* the holder of the worker */
	unsigned int open;    /* calls inside libucp */
	uint64_t open_bytes;  /* theirs */
	unsigned int heavy;   /* heavy ones of them */
	unsigned int closing; /* endpoints */
	uint64_t heavy_ns;    /* when that last was more than the loop's */
	int close_ms;	      /* until the next poll of closing endpoints */
	unsigned int looks;   /* in a row that found nothing */
	bool told;	      /* the loop is to be woken after this round */
	/* under the lock */
	pthread_mutex_t lock;
	struct list calls; /* for the thread to start */
	bool on_thread;	   /* it has the worker */
	bool asleep, stopping;
	struct ucx_call back; /* the thread gives it back */
	pthread_t thread;
	bool started;
	int event_fd; /* wakes the thread */
};

/* Loop's thread. `worker` is zeroed; closing one that did not open is fine. on_ready():
 * libucp has something to do, while the loop has the worker. */
int ucx_worker_open(struct ucx_worker *worker, const struct ucx_lib *lib,
		    ucp_context_h context, struct loop *loop,
		    void (*on_ready)(struct loop_fd *watch, int events));
/* No call is in progress. */
void ucx_worker_close(struct ucx_worker *worker);
void ucx_submit(struct ucx_worker *worker, struct ucx_call *call);
/* Wake the thread for submitted calls; else that is done in the next turn. */
void ucx_submitted(struct ucx_worker *worker);
/* As transport_ops: the loop's share, before it sleeps. */
unsigned int ucx_worker_progress(struct ucx_worker *worker, unsigned int budget);
bool ucx_worker_arm(struct ucx_worker *worker);

/* ---- for the holder of the worker: `start`, and callbacks of libucp ---- */
void ucx_call_over(struct ucx_call *call, ucs_status_t status, size_t length);
/* With the result of ucp_*_nbx: over, unless the callback follows. */
void ucx_call_began(struct ucx_call *call, ucs_status_ptr_t ptr, size_t length);
/* For ucp_request_param_t.cb; user_data is the call. */
void ucx_on_sent(void *request, ucs_status_t status, void *user_data);
void ucx_on_received(void *request, ucs_status_t status, size_t length, void *user_data);
/* Queues only its `done`: an event occurred. Does nothing while that is queued. */
void ucx_tell(struct ucx_worker *worker, struct ucx_call *call);

#endif
