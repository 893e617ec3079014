/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libucp moves bytes inside its calls: one ucp_worker_progress() may send and copy
 * for milliseconds, and nothing makes it shorter. On the loop that would keep every
 * room waiting. So the worker has a thread of its own, which alone calls libucp for it.
 * A call that the loop submits is queued for the thread.
 *
 * The thread sleeps in poll() on libucp's event fd, which ucp_worker_arm() readies,
 * and on its own. libucp ends a closed endpoint in progress calls that neither its
 * event fd nor its arm reports: while a call is under way, the thread looks now and
 * then.
 *
 * A slice crosses some times, and a wake-up costs as much as the slice. So each side
 * wakes the other once for all that it has: the loop when it has gone through what came,
 * the thread after a round.
 *
 * Callbacks of libucp change nothing of the loop's: they end a call or report an event,
 * by the mailbox.
 */
#include "daemon/transport/ucx/ucx_worker.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/cpu.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"

#define ROUND 16u      /* calls, then progress, between looks at the other */
#define LOOKS_MAX 64u  /* for bytes under way before it sleeps: a wake-up costs more */
#define CLOSE_MIN_MS 1 /* a look at an endpoint that closes; then longer */
#define CLOSE_MAX_MS 100

/* ---- calls, on the thread ---- */

static void ucx_worker_call_start(struct ucx_worker *worker, struct ucx_call *call)
{
	worker->open++;
	worker->open_bytes += call->bytes;
	call->start(call);
}

void ucx_tell(struct ucx_worker *worker, struct ucx_call *call)
{
	worker->told |= mailbox_add(&worker->box, &call->link);
}

void ucx_call_over(struct ucx_call *call, ucs_status_t status, size_t length)
{
	call->status = status;
	call->length = length;
	call->worker->open--;
	call->worker->open_bytes -= call->bytes;
	ucx_tell(call->worker, call);
}

void ucx_call_began(struct ucx_call *call, ucs_status_ptr_t ptr, size_t length)
{
	if (!UCS_PTR_IS_PTR(ptr))
		ucx_call_over(call, UCS_PTR_STATUS(ptr), length);
}

void ucx_on_sent(void *request, ucs_status_t status, void *user_data)
{
	ucx_on_received(request, status, 0, user_data);
}

void ucx_on_received(void *request, ucs_status_t status, size_t length, void *user_data)
{
	struct ucx_call *call = user_data;

	call->worker->lib->ucp_request_free(request);
	ucx_call_over(call, status, length);
}

/* ---- the loop ---- */

/* `asleep` was set, and is not any more. */
static void ucx_worker_wake(struct ucx_worker *worker)
{
	uint64_t one = 1;

	if (write(worker->event_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
		log_error("ucx", NULL, "the thread cannot be woken", "errno=%d", errno);
}

static bool take_sleep(struct ucx_worker *worker)
{
	bool asleep = worker->asleep;

	worker->asleep = false;
	return asleep;
}

void ucx_submit(struct ucx_worker *worker, struct ucx_call *call)
{
	call->worker = worker;
	list_init(&call->link);
	pthread_mutex_lock(&worker->lock);
	list_push_back(&worker->calls, &call->link);
	pthread_mutex_unlock(&worker->lock);
	loop_defer(worker->loop, &worker->submitted);
}

static void ucx_worker_wake_for_calls(struct ucx_worker *worker)
{
	bool asleep;

	pthread_mutex_lock(&worker->lock);
	asleep = !list_empty(&worker->calls) && take_sleep(worker);
	pthread_mutex_unlock(&worker->lock);
	if (asleep)
		ucx_worker_wake(worker);
}

static void on_submitted(struct loop_defer *defer)
{
	ucx_worker_wake_for_calls(container_of(defer, struct ucx_worker, submitted));
}

void ucx_submitted(struct ucx_worker *worker)
{
	if (list_empty(&worker->submitted.link))
		return;
	loop_defer_cancel(&worker->submitted);
	ucx_worker_wake_for_calls(worker);
}

static void on_item(struct mailbox *box, struct list *item)
{
	struct ucx_call *call = list_entry(item, struct ucx_call, link);

	(void)box;
	call->bytes = 0;
	call->done(call);
}

/* ---- the thread ---- */

static unsigned int start_calls(struct ucx_worker *worker)
{
	struct list *link;
	unsigned int n;

	for (n = 0; n < ROUND; n++) {
		pthread_mutex_lock(&worker->lock);
		link = list_pop_front(&worker->calls);
		pthread_mutex_unlock(&worker->lock);
		if (!link)
			break;
		cpu_breathe();
		ucx_worker_call_start(worker, list_entry(link, struct ucx_call, link));
	}
	return n;
}

/* False: nothing was there. */
static bool ucx_worker_work(struct ucx_worker *worker)
{
	unsigned int n, started = start_calls(worker);

	for (n = 0; n < ROUND; n++) {
		cpu_breathe();
		if (!worker->lib->ucp_worker_progress(worker->handle))
			break;
	}
	return started + n > 0;
}

/* Until there is something to do. True: there was not, for so long. */
static bool rest(struct ucx_worker *worker, int timeout_ms)
{
	struct pollfd fds[] = {{.fd = worker->event_fd, .events = POLLIN},
			       {.fd = worker->efd, .events = POLLIN}};
	uint64_t count;
	bool sleep;
	int n;

	pthread_mutex_lock(&worker->lock);
	sleep = !worker->stopping && list_empty(&worker->calls);
	worker->asleep = sleep;
	pthread_mutex_unlock(&worker->lock);
	if (!sleep)
		return false;
	n = poll(fds, ARRAY_LEN(fds), timeout_ms);
	pthread_mutex_lock(&worker->lock);
	worker->asleep = false;
	pthread_mutex_unlock(&worker->lock);
	if (fds[0].revents)
		(void)!read(worker->event_fd, &count, sizeof(count));
	return n == 0;
}

/* One round. */
static void ucx_worker_serve(struct ucx_worker *worker)
{
	bool worked = ucx_worker_work(worker);
	bool waits = worker->open || worker->closing;

	if (worker->told) {
		worker->told = false;
		mailbox_wake(&worker->box);
	}
	if (worked) {
		worker->close_ms = CLOSE_MIN_MS;
		worker->looks = 0;
	} else if (worker->open_bytes && worker->looks < LOOKS_MAX) {
		worker->looks++;
		sched_yield();
	} else if (worker->lib->ucp_worker_arm(worker->handle) != UCS_ERR_BUSY &&
		   rest(worker, waits ? worker->close_ms : -1)) {
		if (worker->close_ms < CLOSE_MAX_MS)
			worker->close_ms *= 2;
	}
}

static void *ucx_worker_thread_main(void *arg)
{
	struct ucx_worker *worker = arg;
	bool stopping = false;

	while (!stopping) {
		ucx_worker_serve(worker);
		pthread_mutex_lock(&worker->lock);
		stopping = worker->stopping;
		pthread_mutex_unlock(&worker->lock);
	}
	return NULL;
}

/* ---- open and close ---- */

static int worker_make(struct ucx_worker *worker, ucp_context_h context)
{
	const struct ucx_lib *lib = worker->lib;
	ucp_worker_params_t params = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE |
			      UCP_WORKER_PARAM_FIELD_EVENTS,
		.thread_mode = UCS_THREAD_MODE_SERIALIZED,
		.events = UCP_WAKEUP_TX | UCP_WAKEUP_RX,
	};
	ucs_status_t status = lib->ucp_worker_create(context, &params, &worker->handle);

	if (status != UCS_OK)
		return err_raise(ERR_TRANSPORT, "ucx: create a worker: %s",
				 lib->ucs_status_string(status));
	status = lib->ucp_worker_get_efd(worker->handle, &worker->efd);
	if (status != UCS_OK)
		return err_raise(ERR_TRANSPORT, "ucx: event fd: %s",
				 lib->ucs_status_string(status));
	return 0;
}

int ucx_worker_open(struct ucx_worker *worker, const struct ucx_lib *lib,
		    ucp_context_h context, struct loop *loop)
{
	int r;

	worker->lib = lib;
	worker->loop = loop;
	worker->event_fd = -1;
	worker->close_ms = CLOSE_MIN_MS;
	pthread_mutex_init(&worker->lock, NULL);
	list_init(&worker->calls);
	loop_defer_init(&worker->submitted, on_submitted);
	r = worker_make(worker, context);
	if (r < 0)
		return err_pass(r);
	r = mailbox_init(&worker->box, loop, on_item);
	if (r < 0)
		return err_pass(r);
	worker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (worker->event_fd < 0)
		return err_raise_errno(errno, "ucx: the thread's eventfd");
	return 0;
}

int ucx_worker_run(struct ucx_worker *worker)
{
	int r = thread_start("kvd-ucx", ucx_worker_thread_main, worker, &worker->thread);

	worker->started = r == 0;
	return err_pass(r);
}

void ucx_worker_close(struct ucx_worker *worker)
{
	if (!worker->lib)
		return;
	if (worker->started) {
		pthread_mutex_lock(&worker->lock);
		worker->stopping = true;
		pthread_mutex_unlock(&worker->lock);
		ucx_worker_wake(worker);
		pthread_join(worker->thread, NULL);
		assert(list_empty(&worker->calls) && worker->open == 0);
	}
	loop_defer_cancel(&worker->submitted);
	mailbox_fini(&worker->box);
	if (worker->handle)
		worker->lib->ucp_worker_destroy(worker->handle);
	mem_closep(&worker->event_fd);
	pthread_mutex_destroy(&worker->lock);
	worker->lib = NULL;
}
