/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake driver's streams: a thread each, which does what was queued in order
 * and later. Where a range of a copy is not there any more when its turn comes,
 * the context breaks, as on a device.
 *
 * A copy with a pace is done in pieces, so that somebody who watches sees it in
 * flight. Events count how often they were recorded and how often that point
 * was reached; events for other processes keep the two counts in a memfd.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tests/gpu/fake_cuda.h"

#define PIECE_BYTES (UINT64_C(64) << 10)
#define EVENT_FLAGS ((unsigned int)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))

enum kind {
	WORK_COPY,
	WORK_COPY2D,
	WORK_COPY3D,
	WORK_BATCH,
	WORK_CALL,
	WORK_WRITE,
	WORK_FILL,
	WORK_HOST,
	WORK_RECORD,
	WORK_WAIT,
	WORK_AWAIT_WORD
};

/* of an event */
struct point {
	uint64_t recorded, reached;
};

struct cu_event {
	struct list link; /* events */
	struct cu_ctx *ctx;
	struct point point;
};

struct work {
	struct list link;
	enum kind kind;
	uint64_t dst, src;
	size_t bytes;
	struct cu_copy2d copy2d;
	struct cu_copy3d copy3d;
	uint64_t *dsts, *srcs;
	size_t *sizes;
	size_t count;
	int (*call)(void *arg);
	void *call_arg; /* freed */
	struct point *point;
	uint64_t value;
	void (*function)(void *arg);
	void *arg;
};

struct cu_stream {
	struct list link; /* ctx->streams */
	struct cu_ctx *ctx;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t change;
	struct list queue;
	bool busy, ending;
};

/* a copy of cuMemcpyHtoD's that the device has not done yet */
struct late {
	struct list link;
	struct cu_ctx *ctx;
	uint64_t dst, bytes;
	uint8_t data[];
};

static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;
static struct list lates = {&lates, &lates};
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;
static struct list events = {&events, &events};

static void pause_ns(uint64_t ns)
{
	struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u),
			     .tv_nsec = (long)(ns % 1000000000u)};

	if (ns)
		clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

/* ---- doing ---- */

/* Many short rows together, because no sleep is that short. */
void fake_pace(uint64_t bytes)
{
	static _Thread_local uint64_t owed_ns;

	owed_ns += bytes * fake_ns_per_kib() / 1024;
	if (owed_ns < 200000)
		return;
	pause_ns(owed_ns);
	owed_ns = 0;
}

static int move(uint64_t dst, uint64_t src, uint64_t bytes)
{
	uint64_t piece = fake_ns_per_kib() ? PIECE_BYTES : bytes;

	for (uint64_t at = 0; at < bytes; at += piece) {
		uint64_t n = bytes - at < piece ? bytes - at : piece;
		uint8_t *to, *from;

		fake_pace(n);
		fake_memory_lock();
		to = fake_reach(dst + at, n, true);
		from = fake_reach(src + at, n, false);
		if (to && from)
			memmove(to, from, n);
		fake_memory_unlock();
		if (!to || !from)
			return CU_ERROR_ILLEGAL_ADDRESS;
	}
	return CU_SUCCESS;
}

static int move2d(const struct cu_copy2d *c)
{
	uint64_t dst = c->dst_device + c->dst_y * c->dst_pitch + c->dst_x;
	uint64_t src = c->src_device + c->src_y * c->src_pitch + c->src_x;
	int result = CU_SUCCESS;

	for (size_t i = 0; i < c->height && result == CU_SUCCESS; i++)
		result = move(dst + i * c->dst_pitch, src + i * c->src_pitch, c->width);
	return result;
}

/* Planes from the last to the first: nothing is promised about their order. */
static int move3d(const struct cu_copy3d *c)
{
	int result = CU_SUCCESS;

	for (size_t z = c->depth; z > 0 && result == CU_SUCCESS; z--) {
		const struct cu_copy2d plane = {
			.src_device =
				c->src_device + (z - 1) * c->src_pitch * c->src_height,
			.src_pitch = c->src_pitch,
			.dst_device =
				c->dst_device + (z - 1) * c->dst_pitch * c->dst_height,
			.dst_pitch = c->dst_pitch,
			.width = c->width,
			.height = c->height};

		result = move2d(&plane);
	}
	return result;
}

/* From the last to the first: nothing is promised about their order. */
static int move_batch(const struct work *w)
{
	int result = CU_SUCCESS;

	for (size_t i = w->count; i > 0 && result == CU_SUCCESS; i--)
		result = move(w->dsts[i - 1], w->srcs[i - 1], w->sizes[i - 1]);
	return result;
}

/* A word that others look at: after all that came before it in the stream. */
static int write_word(const struct work *w)
{
	uint64_t *word;

	fake_memory_lock();
	word = (uint64_t *)(void *)fake_reach(w->dst, sizeof(*word), true);
	if (word)
		__atomic_store_n(word, w->value, __ATOMIC_RELEASE);
	fake_memory_unlock();
	return word ? CU_SUCCESS : CU_ERROR_ILLEGAL_ADDRESS;
}

/* Until somebody has stored at least the value: on a device, too, nothing else ends it.
 */
static int await_word(const struct cu_stream *stream, const struct work *w)
{
	for (;; pause_ns(20000)) {
		const uint64_t *word;
		bool there;

		fake_memory_lock();
		word = (const void *)fake_reach(w->dst, sizeof(*word), false);
		there = word && __atomic_load_n(word, __ATOMIC_ACQUIRE) >= w->value;
		fake_memory_unlock();
		if (!word)
			return CU_ERROR_ILLEGAL_ADDRESS;
		if (there || fake_sticky(stream->ctx))
			return CU_SUCCESS;
	}
}

static int fill(const struct work *w)
{
	uint8_t *to;

	fake_pace(w->bytes);
	fake_memory_lock();
	to = fake_reach(w->dst, w->bytes, true);
	if (to)
		memset(to, (int)w->value, w->bytes);
	fake_memory_unlock();
	return to ? CU_SUCCESS : CU_ERROR_ILLEGAL_ADDRESS;
}

static void point_reach(struct point *p, uint64_t value)
{
	__atomic_store_n(&p->reached, value, __ATOMIC_RELEASE);
}

static bool point_reached(const struct point *p, uint64_t value)
{
	return __atomic_load_n(&p->reached, __ATOMIC_ACQUIRE) >= value;
}

static int work_do(struct cu_stream *stream, const struct work *w)
{
	int result = fake_sticky(stream->ctx);

	if (!result && w->kind <= WORK_CALL)
		result = fake_strike("execute");
	if (result && w->kind != WORK_RECORD)
		return result;
	if (w->kind <= WORK_CALL && fake_idle())
		return CU_SUCCESS;
	switch (w->kind) {
	case WORK_COPY:
		return move(w->dst, w->src, w->bytes);
	case WORK_COPY2D:
		return move2d(&w->copy2d);
	case WORK_COPY3D:
		return move3d(&w->copy3d);
	case WORK_BATCH:
		return move_batch(w);
	case WORK_CALL:
		return w->call(w->call_arg);
	case WORK_WRITE:
		return write_word(w);
	case WORK_FILL:
		return fill(w);
	case WORK_HOST:
		w->function(w->arg);
		break;
	case WORK_RECORD:
		point_reach(w->point, w->value);
		break;
	case WORK_WAIT:
		while (!point_reached(w->point, w->value) && !fake_sticky(stream->ctx))
			pause_ns(20000);
		break;
	case WORK_AWAIT_WORD:
		return await_word(stream, w);
	}
	return CU_SUCCESS;
}

static void work_free(struct work *w)
{
	free(w->dsts);
	free(w->srcs);
	free(w->sizes);
	free(w->call_arg);
	free(w);
}

static void *stream_main(void *arg)
{
	struct cu_stream *stream = arg;

	pthread_mutex_lock(&stream->lock);
	for (;;) {
		struct list *n = list_pop_front(&stream->queue);
		struct work *w;
		int result;

		if (!n && stream->ending)
			break;
		if (!n) {
			pthread_cond_wait(&stream->change, &stream->lock);
			continue;
		}
		w = list_entry(n, struct work, link);
		stream->busy = true;
		pthread_mutex_unlock(&stream->lock);
		result = work_do(stream, w);
		if (result)
			fake_break(stream->ctx, result);
		work_free(w);
		pthread_mutex_lock(&stream->lock);
		stream->busy = false;
		pthread_cond_broadcast(&stream->change);
	}
	pthread_mutex_unlock(&stream->lock);
	return NULL;
}

/* ---- streams ---- */

int cuStreamCreateWithPriority(struct cu_stream **stream_p, unsigned int flags,
			       int priority)
{
	struct cu_stream *stream;

	ENTER(cuStreamCreateWithPriority);
	(void)priority; /* clamped */
	if (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
		return CU_ERROR_INVALID_VALUE;
	stream = calloc(1, sizeof(*stream));
	if (!stream)
		return CU_ERROR_OUT_OF_MEMORY;
	stream->ctx = fake_current();
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->change, NULL);
	list_init(&stream->queue);
	if (pthread_create(&stream->thread, NULL, stream_main, stream)) {
		free(stream);
		return CU_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&streams_lock);
	list_push_back(&stream->ctx->streams, &stream->link);
	pthread_mutex_unlock(&streams_lock);
	fake_count(1);
	*stream_p = stream;
	return CU_SUCCESS;
}

static void stream_drain(struct cu_stream *stream)
{
	pthread_mutex_lock(&stream->lock);
	while (stream->busy || !list_empty(&stream->queue))
		pthread_cond_wait(&stream->change, &stream->lock);
	pthread_mutex_unlock(&stream->lock);
}

/* The legacy stream's: what came late is done now, at the latest. */
static void lates_end(struct cu_ctx *ctx)
{
	struct late *late;

	pthread_mutex_lock(&late_lock);
	list_foreach_safe(late, &lates, link) {
		int result;

		if (late->ctx != ctx)
			continue;
		result = move(late->dst, (uintptr_t)late->data, late->bytes);
		if (result)
			fake_break(ctx, result);
		list_remove(&late->link);
		free(late);
	}
	pthread_mutex_unlock(&late_lock);
}

void fake_streams_drain(struct cu_ctx *ctx)
{
	struct cu_stream *stream;

	lates_end(ctx);
	pthread_mutex_lock(&streams_lock);
	list_foreach(stream, &ctx->streams, link)
		stream_drain(stream);
	pthread_mutex_unlock(&streams_lock);
}

int cuStreamDestroy_v2(struct cu_stream *stream)
{
	int result = fake_enter("cuStreamDestroy_v2", false);

	/* gone in any case: a result here is of earlier work */
	pthread_mutex_lock(&streams_lock);
	list_remove(&stream->link);
	pthread_mutex_unlock(&streams_lock);
	pthread_mutex_lock(&stream->lock);
	stream->ending = true;
	pthread_cond_broadcast(&stream->change);
	pthread_mutex_unlock(&stream->lock);
	pthread_join(stream->thread, NULL);
	pthread_mutex_destroy(&stream->lock);
	pthread_cond_destroy(&stream->change);
	free(stream);
	fake_count(-1);
	return result;
}

int cuStreamSynchronize(struct cu_stream *stream)
{
	ENTER(cuStreamSynchronize);
	if (stream)
		stream_drain(stream);
	else
		lates_end(fake_current());
	return fake_sticky(fake_current());
}

/* Takes the work, also when it fails. */
static int queue(struct cu_stream *stream, struct work *w)
{
	if (!w)
		return CU_ERROR_OUT_OF_MEMORY;
	if (!stream) { /* the legacy stream: done at once */
		struct cu_stream now = {.ctx = fake_current()};
		int result;

		lates_end(now.ctx);
		result = work_do(&now, w);
		if (result)
			fake_break(now.ctx, result);
		work_free(w);
		return result;
	}
	list_init(&w->link);
	pthread_mutex_lock(&stream->lock);
	list_push_back(&stream->queue, &w->link);
	pthread_cond_broadcast(&stream->change);
	pthread_mutex_unlock(&stream->lock);
	return CU_SUCCESS;
}

static struct work *work_new(enum kind kind)
{
	struct work *w = calloc(1, sizeof(*w));

	if (w)
		w->kind = kind;
	return w;
}

int fake_queue_call(struct cu_stream *stream, int (*call)(void *arg), void *arg)
{
	struct work *w = NULL;

	if (stream && stream->ctx != fake_current()) {
		free(arg);
		return CU_ERROR_INVALID_HANDLE;
	}
	w = work_new(WORK_CALL);
	if (!w) {
		free(arg);
		return CU_ERROR_OUT_OF_MEMORY;
	}
	w->call = call;
	w->call_arg = arg;
	return queue(stream, w);
}

/* ---- copies ---- */

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, struct cu_stream *stream)
{
	struct work *w;

	ENTER(cuMemcpyAsync);
	w = work_new(WORK_COPY);
	if (w) {
		w->dst = dst;
		w->src = src;
		w->bytes = bytes;
	}
	return queue(stream, w);
}

int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t bytes)
{
	ENTER(cuMemcpyDtoH_v2);
	lates_end(fake_current());
	return move((uintptr_t)dst, src, bytes);
}

/* From pageable memory it returns when the bytes have been taken ("API synchronization
 * behavior"): here they get there when somebody waits for it, and not before. */
int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t bytes)
{
	struct late *late;
	bool pinned;

	ENTER(cuMemcpyHtoD_v2);
	fake_memory_lock();
	pinned = fake_is_pinned((uintptr_t)src, bytes);
	fake_memory_unlock();
	if (pinned) {
		lates_end(fake_current());
		return move(dst, (uintptr_t)src, bytes);
	}
	late = malloc(sizeof(*late) + bytes);
	if (!late)
		return CU_ERROR_OUT_OF_MEMORY;
	list_init(&late->link);
	late->ctx = fake_current();
	late->dst = dst;
	late->bytes = bytes;
	memcpy(late->data, src, bytes);
	pthread_mutex_lock(&late_lock);
	list_push_back(&lates, &late->link);
	pthread_mutex_unlock(&late_lock);
	return CU_SUCCESS;
}

int cuMemcpy2DAsync_v2(const struct cu_copy2d *copy, struct cu_stream *stream)
{
	struct work *w;

	ENTER(cuMemcpy2DAsync_v2);
	if (copy->src_type != CU_MEMORYTYPE_UNIFIED ||
	    copy->dst_type != CU_MEMORYTYPE_UNIFIED || copy->src_pitch < copy->width ||
	    copy->dst_pitch < copy->width)
		return CU_ERROR_INVALID_VALUE;
	w = work_new(WORK_COPY2D);
	if (w)
		w->copy2d = *copy;
	return queue(stream, w);
}

#ifndef FAKE_CUDA_OLD
/* As strict as cuda.h: what kvd does not use is zero, planes do not overlap. */
int cuMemcpy3DAsync_v2(const struct cu_copy3d *copy, struct cu_stream *stream)
{
	struct work *w;

	ENTER(cuMemcpy3DAsync_v2);
	if (copy->src_type != CU_MEMORYTYPE_UNIFIED ||
	    copy->dst_type != CU_MEMORYTYPE_UNIFIED || copy->src_pitch < copy->width ||
	    copy->dst_pitch < copy->width || copy->src_height < copy->height ||
	    copy->dst_height < copy->height || copy->src_lod || copy->dst_lod ||
	    copy->src_x || copy->src_y || copy->src_z || copy->dst_x || copy->dst_y ||
	    copy->dst_z || copy->reserved0 || copy->reserved1 || !copy->depth)
		return CU_ERROR_INVALID_VALUE;
	w = work_new(WORK_COPY3D);
	if (w)
		w->copy3d = *copy;
	return queue(stream, w);
}

static void *copy_of(const void *from, size_t bytes)
{
	void *to = malloc(bytes);

	return to ? memcpy(to, from, bytes) : NULL;
}

int cuMemcpyBatchAsync_v2(uint64_t *dsts, uint64_t *srcs, size_t *sizes, size_t count,
			  struct cu_copy_attributes *attributes, size_t *indices,
			  size_t attributes_n, struct cu_stream *stream)
{
	struct work *w;

	ENTER(cuMemcpyBatchAsync_v2);
	if (!stream || !count || attributes_n != 1 || indices[0] != 0 ||
	    attributes->src_order != CU_MEMCPY_SRC_ORDER_STREAM ||
	    (attributes->flags & ~(unsigned int)CU_MEMCPY_PREFER_OVERLAP))
		return CU_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++)
		if (!dsts[i] || !srcs[i] || !sizes[i])
			return CU_ERROR_INVALID_VALUE;
	w = work_new(WORK_BATCH);
	if (!w)
		return CU_ERROR_OUT_OF_MEMORY;
	w->count = count;
	w->dsts = copy_of(dsts, count * sizeof(*dsts));
	w->srcs = copy_of(srcs, count * sizeof(*srcs));
	w->sizes = copy_of(sizes, count * sizeof(*sizes));
	if (!w->dsts || !w->srcs || !w->sizes) {
		work_free(w);
		return CU_ERROR_OUT_OF_MEMORY;
	}
	return queue(stream, w);
}
#endif

/* ---- what engines put into streams ---- */

static int queue_word(struct cu_stream *stream, enum kind kind, uint64_t address,
		      uint64_t value, unsigned int flags)
{
	struct work *w;
	bool there;

	fake_memory_lock();
	there = fake_is_device(address) || fake_is_mapped(address, sizeof(value), true);
	fake_memory_unlock();
	if (!there || address % sizeof(value) || flags)
		return CU_ERROR_INVALID_VALUE;
	w = work_new(kind);
	if (w) {
		w->dst = address;
		w->value = value;
	}
	return queue(stream, w);
}

int cuStreamWriteValue64_v2(struct cu_stream *stream, uint64_t address, uint64_t value,
			    unsigned int flags)
{
	ENTER(cuStreamWriteValue64_v2);
	return queue_word(stream, WORK_WRITE, address, value, flags);
}

/* flags 0: CU_STREAM_WAIT_VALUE_GEQ */
int cuStreamWaitValue64_v2(struct cu_stream *stream, uint64_t address, uint64_t value,
			   unsigned int flags)
{
	ENTER(cuStreamWaitValue64_v2);
	return queue_word(stream, WORK_AWAIT_WORD, address, value, flags);
}

int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t bytes,
		    struct cu_stream *stream)
{
	struct work *w;

	ENTER(cuMemsetD8Async);
	if (!fake_is_device(address))
		return CU_ERROR_INVALID_VALUE;
	w = work_new(WORK_FILL);
	if (w) {
		w->dst = address;
		w->bytes = bytes;
		w->value = byte;
	}
	return queue(stream, w);
}

int cuLaunchHostFunc(struct cu_stream *stream, void (*function)(void *arg), void *arg)
{
	struct work *w;

	ENTER(cuLaunchHostFunc);
	w = work_new(WORK_HOST);
	if (w) {
		w->function = function;
		w->arg = arg;
	}
	return queue(stream, w);
}

int cuCtxSynchronize(void)
{
	ENTER(cuCtxSynchronize);
	fake_streams_drain(fake_current());
	return fake_sticky(fake_current());
}

/* ---- events ---- */

static void event_add(struct cu_event *event)
{
	event->ctx = fake_current();
	pthread_mutex_lock(&events_lock);
	list_push_back(&events, &event->link);
	pthread_mutex_unlock(&events_lock);
	fake_count(1);
}

/* The lock is held. */
static void event_free(struct cu_event *event)
{
	list_remove(&event->link);
	free(event);
	fake_count(-1);
}

void fake_events_drop(struct cu_ctx *ctx)
{
	struct cu_event *event;

	pthread_mutex_lock(&events_lock);
	list_foreach_safe(event, &events, link)
		if (event->ctx == ctx)
			event_free(event);
	pthread_mutex_unlock(&events_lock);
}

int cuEventCreate(struct cu_event **event_p, unsigned int flags)
{
	struct cu_event *event;

	ENTER(cuEventCreate);
	if (flags & ~EVENT_FLAGS)
		return CU_ERROR_INVALID_VALUE;
	event = calloc(1, sizeof(*event));
	if (!event)
		return CU_ERROR_OUT_OF_MEMORY;
	event_add(event);
	*event_p = event;
	return CU_SUCCESS;
}

int cuEventDestroy_v2(struct cu_event *event)
{
	int result = fake_enter("cuEventDestroy_v2", true);

	if (result == CU_ERROR_INVALID_CONTEXT)
		return result; /* it goes with its context */
	for (int i = 0; i < fake_device_count(); i++)
		fake_streams_drain(fake_ctx(i)); /* a record may be queued */
	pthread_mutex_lock(&events_lock);
	event_free(event);
	pthread_mutex_unlock(&events_lock);
	return result;
}

int cuEventRecord(struct cu_event *event, struct cu_stream *stream)
{
	struct work *w;

	ENTER(cuEventRecord);
	if (event->ctx != (stream ? stream->ctx : fake_current()))
		return CU_ERROR_INVALID_HANDLE;
	w = work_new(WORK_RECORD);
	if (w) {
		w->point = &event->point;
		w->value =
			__atomic_add_fetch(&event->point.recorded, 1, __ATOMIC_SEQ_CST);
	}
	return queue(stream, w);
}

static uint64_t recorded(const struct cu_event *event)
{
	return __atomic_load_n(&event->point.recorded, __ATOMIC_SEQ_CST);
}

/* Whoever asks for an event of his own asks until it has come: one call, which may fail.
 */
int cuEventQuery(struct cu_event *event)
{
	if (fake_current() && !fake_sticky(fake_current()) &&
	    !point_reached(&event->point, recorded(event)))
		return CU_ERROR_NOT_READY;
	ENTER(cuEventQuery);
	return point_reached(&event->point, recorded(event)) ? fake_sticky(fake_current())
							     : CU_ERROR_NOT_READY;
}

int cuEventSynchronize(struct cu_event *event)
{
	uint64_t value;

	ENTER(cuEventSynchronize);
	value = recorded(event);
	while (!point_reached(&event->point, value))
		pause_ns(5000);
	return fake_sticky(fake_current());
}

int cuStreamWaitEvent(struct cu_stream *stream, struct cu_event *event,
		      unsigned int flags)
{
	struct work *w;

	ENTER(cuStreamWaitEvent);
	if (flags)
		return CU_ERROR_INVALID_VALUE;
	w = work_new(WORK_WAIT);
	if (w) {
		w->point = &event->point;
		w->value = recorded(event);
	}
	return queue(stream, w);
}
