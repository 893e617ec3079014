/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The I/O threads. Each has an edge-triggered epoll set and a list of streams that can
 * make progress; these take turns, a few frames each, so that one fast stream starves no
 * other. A thread waits only in epoll.
 *
 * They are throughput work (SCHED_BATCH): the loop and the engines have priority. Streams
 * of a peer are spread over the threads; a stream stays with its thread, so a half has
 * one owner and needs no lock.
 *
 * To release a stream the loop marks it closing, shuts its socket down and kicks the
 * thread; the thread answers with `gone`. Only then is the fd closed and the memory
 * freed.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/cpu.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "gpu/pin.h"

#define PAGE_BYTES 4096u
#define EVENTS 64

/* ---- from the loop ---- */

static void tcp_io_wake(struct tcp_thread *thread)
{
	uint64_t one = 1;

	/* full counter: it is awake anyway */
	if (write(thread->event_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
		log_error("tcp", NULL, "cannot wake an I/O thread", "errno=%d", errno);
}

void tcp_io_kick(struct tcp_stream *stream)
{
	struct tcp_thread *thread = stream->thread;
	bool first;

	pthread_mutex_lock(&thread->lock);
	first = list_empty(&thread->kicked);
	if (list_empty(&stream->kick_link))
		list_push_back(&thread->kicked, &stream->kick_link);
	pthread_mutex_unlock(&thread->lock);
	if (first)
		tcp_io_wake(thread);
}

void tcp_io_add(struct tcp_stream *stream)
{
	struct tcp_transport *transport = stream->peer->transport;

	stream->thread =
		&transport->threads[transport->next_thread++ % transport->thread_count];
	tcp_io_kick(stream);
}

void tcp_io_remove(struct tcp_stream *stream)
{
	pthread_mutex_lock(&stream->peer->lock);
	stream->closing = true;
	/* under the lock: a thread that was kicked before, and sees `closing`, releases
	 * it with this kick, and not before it */
	tcp_io_kick(stream);
	pthread_mutex_unlock(&stream->peer->lock);
	(void)shutdown(stream->fd, SHUT_RDWR);
}

void tcp_io_notify(struct tcp_peer *peer)
{
	mailbox_put(&peer->transport->events, &peer->event_link);
}

static void tcp_io_on_event(struct mailbox *box, struct list *link)
{
	(void)box;
	net_peer_kick(&list_entry(link, struct tcp_peer, event_link)->net);
}

/* ---- the threads ---- */

static struct tcp_bounce *bounce_new(struct tcp_thread *thread)
{
	struct tcp_bounce *bounce =
		mem_zalloc(sizeof(*bounce) + TCP_BOUNCE_BYTES + PAGE_BYTES - 1);
	uintptr_t behind;

	if (!bounce)
		return NULL;
	behind = (uintptr_t)(bounce + 1) + PAGE_BYTES - 1;
	bounce->bytes = (uint8_t *)(behind & ~(uintptr_t)(PAGE_BYTES - 1));
	if (gpu_pin_new(thread->transport->net.base.env.gpu, bounce->bytes, TCP_DATA_MAX,
			false, &bounce->pin) < 0)
		err_clear(); /* a GPU's bytes take a step more */
	return bounce;
}

struct tcp_bounce *tcp_bounce_take(struct tcp_thread *thread)
{
	struct tcp_bounce *bounce = thread->bounces;

	if (!bounce)
		return bounce_new(thread);
	thread->bounces = bounce->next;
	return bounce;
}

void tcp_bounce_give(struct tcp_thread *thread, struct tcp_bounce **bounce)
{
	if (!*bounce)
		return;
	(*bounce)->next = thread->bounces;
	thread->bounces = *bounce;
	*bounce = NULL;
}

void tcp_stream_fail(struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;

	stream->can_read = stream->can_write = false;
	stream->failed = true;
	pthread_mutex_lock(&peer->lock);
	if (peer->io_err.code == ERR_OK && !stream->closing) {
		err_take(&peer->io_err);
		tcp_io_notify(peer);
	}
	pthread_mutex_unlock(&peer->lock);
	err_clear();
}

static void tcp_io_let_go(struct tcp_thread *thread, struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;

	if (stream->added)
		(void)epoll_ctl(thread->epoll_fd, EPOLL_CTL_DEL, stream->fd, NULL);
	list_remove(&stream->busy_link);
	pthread_mutex_lock(&thread->lock);
	list_remove(&stream->kick_link);
	pthread_mutex_unlock(&thread->lock);
	tcp_bounce_give(thread, &stream->tx.bounce);
	tcp_bounce_give(thread, &stream->rx.bounce);
	tcp_bounce_give(thread, &stream->tx.record);
	tcp_bounce_give(thread, &stream->rx.record);
	pthread_mutex_lock(&peer->lock);
	stream->gone = true;
	tcp_io_notify(peer); /* the last touch: the loop may free it now */
	pthread_mutex_unlock(&peer->lock);
}

static void take_on(struct tcp_thread *thread, struct tcp_stream *stream)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
				    .data.ptr = stream};

	stream->added = true;
	stream->can_read = stream->can_write = true;
	if (epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, stream->fd, &event) < 0) {
		err_raise_errno(errno, "tcp: watch a stream");
		tcp_stream_fail(stream);
	}
}

static void take_kicked(struct tcp_thread *thread)
{
	struct tcp_stream *stream;
	struct list *link;
	bool closing;

	for (;;) {
		pthread_mutex_lock(&thread->lock);
		link = list_pop_front(&thread->kicked);
		pthread_mutex_unlock(&thread->lock);
		if (!link)
			return;
		stream = list_entry(link, struct tcp_stream, kick_link);
		pthread_mutex_lock(&stream->peer->lock);
		closing = stream->closing;
		pthread_mutex_unlock(&stream->peer->lock);
		if (closing) {
			tcp_io_let_go(thread, stream);
			continue;
		}
		if (!stream->added)
			take_on(thread, stream);
		if (list_empty(&stream->busy_link))
			list_push_back(&thread->busy, &stream->busy_link);
	}
}

static void take_events(struct tcp_thread *thread)
{
	struct epoll_event events[EVENTS];
	uint64_t count;
	int n = epoll_wait(thread->epoll_fd, events, EVENTS,
			   list_empty(&thread->busy) ? -1 : 0);

	for (int i = 0; i < n; i++) {
		struct tcp_stream *stream = events[i].data.ptr;

		if (!stream) {
			(void)!read(thread->event_fd, &count, sizeof(count));
			continue;
		}
		if (events[i].events & ~(uint32_t)EPOLLOUT)
			stream->can_read = true;
		if (events[i].events & ~(uint32_t)(EPOLLIN | EPOLLRDHUP))
			stream->can_write = true;
		if (list_empty(&stream->busy_link))
			list_push_back(&thread->busy, &stream->busy_link);
	}
}

static void tcp_io_work(struct tcp_thread *thread)
{
	struct tcp_stream *stream;

	list_foreach_safe(stream, &thread->busy, busy_link) {
		bool more = false;

		cpu_breathe();
		if (stream->can_read && !stream->failed)
			more |= tcp_rx_work(stream);
		if (stream->can_write && !stream->failed)
			more |= tcp_tx_work(stream);
		if (!more)
			list_remove(&stream->busy_link);
	}
}

static void *tcp_io_thread_main(void *arg)
{
	struct tcp_thread *thread = arg;
	bool stopping = false;

	cpu_bulk();
	while (!stopping) {
		take_events(thread);
		take_kicked(thread);
		tcp_io_work(thread);
		pthread_mutex_lock(&thread->lock);
		stopping = thread->stopping;
		pthread_mutex_unlock(&thread->lock);
	}
	return NULL;
}

/* ---- open and close ---- */

static int io_start(struct tcp_thread *thread)
{
	struct epoll_event event = {.events = EPOLLIN};
	int r = copy_hand_new(&thread->hand);

	if (r < 0)
		return err_pass(r);
	thread->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	thread->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (thread->epoll_fd < 0 || thread->event_fd < 0 ||
	    epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, thread->event_fd, &event) < 0)
		return err_raise_errno(errno, "tcp: an I/O thread's epoll");
	r = thread_start("kvd-tcp", tcp_io_thread_main, thread, &thread->thread);
	thread->started = r == 0;
	return err_pass(r);
}

int tcp_io_open(struct tcp_transport *transport)
{
	const unsigned int count = transport->thread_count;
	int r = mailbox_init(&transport->events, transport->net.base.env.loop,
			     tcp_io_on_event);

	transport->thread_count = 0;
	if (r == 0) {
		transport->threads = mem_calloc(count, sizeof(*transport->threads));
		r = transport->threads ? 0 : -ENOMEM;
	}
	while (r == 0 && transport->thread_count < count) {
		struct tcp_thread *thread =
			&transport->threads[transport->thread_count++];

		thread->transport = transport;
		thread->epoll_fd = thread->event_fd = -1;
		list_init(&thread->kicked);
		list_init(&thread->busy);
		pthread_mutex_init(&thread->lock, NULL);
		r = io_start(thread);
	}
	return err_pass(r);
}

static void thread_end(struct tcp_thread *thread)
{
	struct tcp_bounce *bounce;

	if (thread->started) {
		pthread_mutex_lock(&thread->lock);
		thread->stopping = true;
		pthread_mutex_unlock(&thread->lock);
		tcp_io_wake(thread);
		pthread_join(thread->thread, NULL);
	}
	while ((bounce = thread->bounces)) {
		thread->bounces = bounce->next;
		gpu_pin_free(bounce->pin);
		mem_free(bounce);
	}
	copy_hand_free(thread->hand);
	mem_closep(&thread->epoll_fd);
	mem_closep(&thread->event_fd);
	pthread_mutex_destroy(&thread->lock);
}

void tcp_io_close(struct tcp_transport *transport)
{
	for (unsigned int i = 0; i < transport->thread_count; i++)
		thread_end(&transport->threads[i]);
	mem_free(transport->threads);
	mailbox_fini(&transport->events);
}
