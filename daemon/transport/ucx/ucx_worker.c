/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libucp moves bytes inside its calls: one ucp_worker_progress() may send and copy for
 * milliseconds, and nothing makes it shorter. On the loop that would keep every room
 * waiting. So the worker has its own thread.
 *
 * But a change of threads costs as much as a short message, and a room needs five of them
 * and two for each slice. So the worker belongs to one of two at a time: to the loop
 * while libucp has at most one small transfer's bytes in flight, else to the thread. The
 * loop hands it over when it submits more than that, or a call that is heavy. The thread
 * returns it when nothing heavy has been in flight for a while (CALM_NS). libucp allows
 * that (UCS_THREAD_MODE_SERIALIZED); the lock, or the mailbox, lies between the one's
 * last use and the other's first.
 *
 * Neither ever waits for the other. A call that is submitted while the thread has the
 * worker is queued for it. Whether the loop has the worker is known on the loop only
 * (`away`): calls that it queues while the worker is being returned have no holder, so
 * the worker is passed to the thread again once it is back (on_back).
 *
 * The thread sleeps in poll() on libucp's event fd, which ucp_worker_arm() readies, and
 * on its own. libucp ends a closed endpoint in progress calls that neither its event fd
 * nor its arm reports: while one closes, the thread polls periodically.
 *
 * A slice crosses several times, and a wake-up costs as much as the slice. So each side
 * wakes the other once for all its items: the loop after handling received events, the
 * thread after a round.
 *
 * Callbacks of libucp change no state of the loop: they end a call or report an event, by
 * the mailbox.
 */
#include "daemon/transport/ucx/ucx_worker.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/cpu.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"

/* The most that libucp may have to move while the loop has the worker: a small
 * transfer. */
#define LOOP_BYTES (UINT64_C(4608) << 10)
#define ROUND 16u /* calls, then progress, of the thread between checks of the other */
#define CALM_NS (2 * LOOP_NS_PER_MS) /* with at most this in flight it is returned */
#define LOOKS_MAX 64u  /* for bytes in flight before it sleeps: a wake-up costs more */
#define CLOSE_MIN_MS 1 /* poll interval of a closing endpoint; then longer */
#define CLOSE_MAX_MS 100

/* ---- the holder of the worker ---- */

static void ucx_worker_call_start(struct ucx_worker *worker, struct ucx_call *call)
{
	worker->open++;
	worker->open_bytes += call->bytes;
	worker->heavy += call->heavy;
	call->start(call);
}

void ucx_tell(struct ucx_worker *worker, struct ucx_call *call)
{
	if (worker->on_thread)
		worker->told |= mailbox_add(&worker->box, &call->link);
	else
		mailbox_post(&worker->box, &call->link);
}

void ucx_call_over(struct ucx_call *call, ucs_status_t status, size_t length)
{
	call->status = status;
	call->length = length;
	call->worker->open--;
	call->worker->open_bytes -= call->bytes;
	call->worker->heavy -= call->heavy;
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
		log_error("ucx", NULL, "cannot wake the thread", "errno=%d", errno);
}

static bool take_sleep(struct ucx_worker *worker)
{
	bool asleep = worker->asleep;

	worker->asleep = false;
	return asleep;
}

static void hand_over(struct ucx_worker *worker)
{
	bool asleep;

	worker->heavy_ns = clock_ns();
	worker->away = true;
	loop_fd_stop(&worker->watch);
	pthread_mutex_lock(&worker->lock);
	worker->on_thread = true;
	asleep = take_sleep(worker);
	pthread_mutex_unlock(&worker->lock);
	if (asleep)
		ucx_worker_wake(worker);
}

static void on_back(struct ucx_call *call)
{
	struct ucx_worker *worker = container_of(call, struct ucx_worker, back);
	bool queued;

	worker->away = false;
	pthread_mutex_lock(&worker->lock);
	queued = !list_empty(&worker->calls);
	pthread_mutex_unlock(&worker->lock);
	if (queued || loop_fd_set(&worker->watch, LOOP_READ) < 0) {
		err_clear(); /* without a watch it does better there */
		hand_over(worker);
	}
}

void ucx_submit(struct ucx_worker *worker, struct ucx_call *call)
{
	call->worker = worker;
	list_init(&call->link);
	worker->bytes += call->bytes;
	if (!worker->away && (call->heavy || worker->bytes > LOOP_BYTES))
		hand_over(worker);
	if (!worker->away) {
		ucx_worker_call_start(worker, call);
		return;
	}
	pthread_mutex_lock(&worker->lock);
	list_push_back(&worker->calls, &call->link);
	pthread_mutex_unlock(&worker->lock);
	loop_defer(worker->watch.loop, &worker->submitted);
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
	struct ucx_worker *worker = container_of(box, struct ucx_worker, box);
	struct ucx_call *call = list_entry(item, struct ucx_call, link);

	worker->bytes -= call->bytes;
	call->bytes = 0;
	call->done(call);
}

unsigned int ucx_worker_progress(struct ucx_worker *worker, unsigned int budget)
{
	struct loop *loop = worker->watch.loop;
	unsigned int done = 0;

	while (!worker->away && done < budget &&
	       worker->lib->ucp_worker_progress(worker->handle)) {
		done++;
		if (loop_enough(loop))
			break; /* arm will find the rest */
	}
	mailbox_deliver(&worker->box);
	return done;
}

bool ucx_worker_arm(struct ucx_worker *worker)
{
	return !worker->away &&
	       worker->lib->ucp_worker_arm(worker->handle) == UCS_ERR_BUSY;
}

/* ---- the thread ---- */

static bool is_heavy(const struct ucx_worker *worker)
{
	return worker->closing || worker->heavy || worker->open_bytes > LOOP_BYTES;
}

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
	if (is_heavy(worker))
		worker->heavy_ns = clock_ns();
	return started + n > 0;
}

/* With the worker or without it, until there is something to do. True: there was not,
 * for so long. */
static bool rest(struct ucx_worker *worker, bool has, int timeout_ms)
{
	struct pollfd fds[] = {{.fd = worker->event_fd, .events = POLLIN},
			       {.fd = worker->efd, .events = POLLIN}};
	uint64_t count;
	bool sleep;
	int n;

	pthread_mutex_lock(&worker->lock);
	sleep = !worker->stopping &&
		(has ? list_empty(&worker->calls) : !worker->on_thread);
	worker->asleep = sleep;
	pthread_mutex_unlock(&worker->lock);
	if (!sleep)
		return false;
	n = poll(fds, has ? 2 : 1, timeout_ms);
	pthread_mutex_lock(&worker->lock);
	worker->asleep = false;
	pthread_mutex_unlock(&worker->lock);
	if (fds[0].revents)
		(void)!read(worker->event_fd, &count, sizeof(count));
	return n == 0;
}

static void ucx_worker_give_back(struct ucx_worker *worker)
{
	bool given;

	pthread_mutex_lock(&worker->lock);
	given = list_empty(&worker->calls);
	worker->on_thread = !given;
	pthread_mutex_unlock(&worker->lock);
	if (given)
		mailbox_put(&worker->box, &worker->back.link);
}

/* The thread has the worker: one round of it. */
static void ucx_worker_serve(struct ucx_worker *worker)
{
	bool worked = ucx_worker_work(worker);
	uint64_t calm_ns = clock_ns() - worker->heavy_ns;

	if (worker->told) {
		worker->told = false;
		mailbox_wake(&worker->box);
	}
	if (calm_ns >= CALM_NS) {
		ucx_worker_give_back(worker);
	} else if (worked) {
		worker->close_ms = CLOSE_MIN_MS;
		worker->looks = 0;
	} else if (worker->open_bytes && worker->looks < LOOKS_MAX) {
		worker->looks++;
		sched_yield();
	} else if (worker->lib->ucp_worker_arm(worker->handle) != UCS_ERR_BUSY &&
		   rest(worker, true,
			is_heavy(worker)
				? worker->close_ms
				: (int)((CALM_NS - calm_ns) / LOOP_NS_PER_MS) + 1)) {
		if (worker->close_ms < CLOSE_MAX_MS)
			worker->close_ms *= 2;
	}
}

static void *ucx_worker_thread_main(void *arg)
{
	struct ucx_worker *worker = arg;
	bool stopping = false, has;

	/* Short time slices, like the loop's: small rooms' messages take this path,
	 * too. */
	while (!stopping) {
		pthread_mutex_lock(&worker->lock);
		stopping = worker->stopping;
		has = worker->on_thread;
		pthread_mutex_unlock(&worker->lock);
		if (has)
			ucx_worker_serve(worker);
		else
			(void)rest(worker, false, -1);
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
		    ucp_context_h context, struct loop *loop,
		    void (*on_ready)(struct loop_fd *watch, int events))
{
	int r;

	worker->lib = lib;
	worker->event_fd = -1;
	worker->close_ms = CLOSE_MIN_MS;
	pthread_mutex_init(&worker->lock, NULL);
	list_init(&worker->calls);
	list_init(&worker->back.link);
	worker->back.done = on_back;
	r = worker_make(worker, context);
	if (r < 0)
		return err_pass(r);
	loop_fd_init(&worker->watch, loop, worker->efd, on_ready);
	loop_defer_init(&worker->submitted, on_submitted);
	r = mailbox_init(&worker->box, loop, on_item);
	if (r == 0)
		r = loop_fd_set(&worker->watch, LOOP_READ);
	if (r < 0)
		return err_pass(r);
	worker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (worker->event_fd < 0)
		return err_raise_errno(errno, "ucx: the thread's eventfd");
	r = thread_start("kvd-ucx", ucx_worker_thread_main, worker, &worker->thread);
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
	if (worker->watch.loop) {
		loop_fd_stop(&worker->watch);
		loop_defer_cancel(&worker->submitted);
	}
	mailbox_fini(&worker->box);
	if (worker->handle)
		worker->lib->ucp_worker_destroy(worker->handle);
	mem_closep(&worker->event_fd);
	pthread_mutex_destroy(&worker->lock);
	worker->lib = NULL;
}
