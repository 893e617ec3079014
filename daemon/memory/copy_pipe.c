/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A slice is bounded in bytes and in rows, so that a cancel waits only for queued slices,
 * and so that the device works while the remaining rows are being looked up.
 *
 * The kinds of the two ends decide a slice's path. The device reaches device memory and
 * pinned memory (pin.h: the buffers between engine memory and the wire, and memfds that
 * cannot be truncated) directly: by kernel or copy engine, as the lane sees fit. All
 * other host memory passes through the lanes' pinned buffers, which the CPU fills or
 * empties under the usual guards: memory of other processes, memory that its owner may
 * truncate, and memory not pinned yet. Rows between two ends in host memory (a table may
 * mix kinds) are the CPU's alone. A slice is cut where that changes.
 *
 * So the path of a staged transfer is: kernel to pinned memory, wire, pinned memory,
 * kernel; and while one slice is on the wire, others are on the streams of both devices.
 *
 * A slice is over when its mark was waited for, or, after any fault, when all lanes are
 * drained. So copy.c's promise of "quiesced" holds here too.
 */
#include "daemon/memory/copy_pipe.h"

#include <assert.h>

#include "daemon/memory/copy_hand.h"
#include "gpu/import.h"
#include "gpu/kern.h"
#include "gpu/pin.h"

/* Rows of a slice: few if the device waits for the first of them, else enough to make a
 * launch's overhead small. */
#define SLICE_ROWS 16384u
#define SLICE_ROWS_FIRST 4096u
/* A slice within the device is this many times larger than others, so that a launch's
 * overhead stays small here, too. (A list has room for 32 MiB of any rows.) */
#define SLICE_INSIDE_FACTOR 4u
/* Runs of fewer rows are not worth a separate entry in a list for the kernel. */
#define SCATTERED_ROWS 4u

/* ---- where the bytes are ---- */

static bool of_device(const struct memory *m)
{
	return m && m->kind == MEMORY_DEVICE;
}

static int memory_check(struct memory *m)
{
	if (!m || memory_owner_alive(m))
		return 0;
	if (of_device(m))
		return err_raise(ERR_FAULT, "the memory on %s is lost: %s",
				 m->gpu->device->id, m->gpu->device->why.text);
	return err_raise(ERR_FAULT, "the memory was lost");
}

/* ---- one slice ---- */

struct slice {
	struct copy_pipe *pipe;
	struct gpu_lane *lane;
	const struct copy_job *job;
	struct plan_walk at;
	uint64_t begin, pos, most; /* stream bytes; at most so many */
	uint64_t host_most;	   /* where an end is in host memory */
	uint64_t rows, rows_most;
	enum copy_way way;
	const struct memory *src, *dst; /* last checked */
	bool pinned;			/* the job's linear end */
	bool flat, host, engines;	/* as gpu_rows has them */
};

/* Is it of a device, or within the reach of this one? */
static bool reached(const struct slice *s, const struct memory *m)
{
	if (!m)
		return s->pinned;
	return of_device(m) || (m->pin && gpu_pin_here(m->pin, s->pipe->device));
}

static enum copy_way way_of(const struct slice *s, const struct memory *src,
			    const struct memory *dst)
{
	if (!of_device(src) && !of_device(dst))
		return COPY_WAY_CPU;
	if (reached(s, src) && reached(s, dst))
		return COPY_WAY_DIRECT;
	return of_device(dst) ? COPY_WAY_IN : COPY_WAY_OUT;
}

/* The next rows of the current run, at most `most` bytes. */
static uint64_t rows_take(struct slice *s, uint64_t most, struct gpu_rows *rows_p)
{
	const struct plan_block rows = plan_walk_rows(&s->at, most, s->rows_most);
	const struct copy_job *job = s->job;
	const struct plan_run *run = rows.run;
	uint64_t skipped = s->pos - job->begin;

	*rows_p = (struct gpu_rows){
		.src = copy_end_address(&job->src, run->src_buffer, rows.src, skipped),
		.dst = copy_end_address(&job->dst, run->dst_buffer, rows.dst, skipped),
		.len = rows.len,
		.count = rows.count,
		.src_stride = job->src.buffers ? run->src_stride : (int64_t)run->len,
		.dst_stride = job->dst.buffers ? run->dst_stride : (int64_t)run->len,
		.flat = s->flat,
		.host = s->host,
		.engines = s->engines,
	};
	return rows.len * rows.count;
}

/* A kernel of the pipe's device gets there by itself. (A table may name memory of
 * other devices, on either end.) */
static bool in_reach(const struct copy_pipe *pipe, const struct memory *m)
{
	return !of_device(m) || gpu_import_reach(m->gpu, pipe->device);
}

/* The most of it, now that its path is known. */
static void slice_bound(struct slice *s)
{
	uint64_t most = s->most;

	if (s->way == COPY_WAY_IN || s->way == COPY_WAY_OUT)
		most = GPU_LANE_BOUNCE_BYTES;
	else if (s->host)
		most = s->host_most;
	if (most < s->most)
		s->most = most;
}

/* Classify the memory of the current run. 0; 1: the slice ends before it, because this
 * run takes another path. */
static int slice_look(struct slice *s)
{
	const struct plan_run *run = &s->at.plan->runs[s->at.run];
	struct memory *src = copy_end_memory(&s->job->src, run->src_buffer);
	struct memory *dst = copy_end_memory(&s->job->dst, run->dst_buffer);
	enum copy_way way;
	int r;

	if (s->way != COPY_WAY_NONE && src == s->src && dst == s->dst)
		return 0;
	way = way_of(s, src, dst);
	if (s->way != COPY_WAY_NONE && way != s->way)
		return 1;
	r = memory_check(src);
	if (r == 0)
		r = memory_check(dst);
	if (r < 0)
		return err_pass(r);
	s->way = way;
	s->src = src;
	s->dst = dst;
	s->flat =
		of_device(src) && of_device(dst) && src->gpu->device != dst->gpu->device;
	s->host = !of_device(src) || !of_device(dst);
	s->engines = !in_reach(s->pipe, src) || !in_reach(s->pipe, dst);
	slice_bound(s);
	return s->pos - s->begin >= s->most ? 1 : 0;
}

/* A part of a job, with a linear end in place of its own. */
static struct copy_job part_of(const struct copy_job *job, uint64_t begin, uint64_t end)
{
	struct copy_job part = {.plan = job->plan,
				.begin = begin,
				.end = end,
				.src = job->src,
				.dst = job->dst};

	if (!part.src.buffers)
		part.src.linear += begin - job->begin;
	if (!part.dst.buffers)
		part.dst.linear += begin - job->begin;
	return part;
}

static struct gpu_lane *lane_of(const struct copy_pipe *pipe, unsigned int index)
{
	return pipe->lanes[index % pipe->lane_count];
}

/* Of the flight at `index`. */
static int bounce_take(struct copy_pipe *pipe, unsigned int index, struct copy_end *end_p)
{
	void *bounce = NULL;
	int r = gpu_lane_bounce(lane_of(pipe, index), index / pipe->lane_count, &bounce);

	*end_p = (struct copy_end){.linear = bounce};
	return err_pass(r);
}

/* Stream bytes that may be queued. */
static uint64_t slice_room(const struct slice *s, uint64_t end)
{
	uint64_t room = s->most - (s->pos - s->begin);

	return room < end - s->pos ? room : end - s->pos;
}

/* A side's byte 0 for the run's buffer, and the distance between consecutive stream
 * bytes, if it is linear: so that a row's address is one addition. */
struct side {
	uint64_t base, step;
};

static struct side copy_pipe_side_of(const struct slice *s, const struct copy_end *end,
				     uint32_t buffer)
{
	if (!end->buffers)
		return (struct side){(uintptr_t)end->linear + s->pos - s->job->begin, 1};
	return (struct side){copy_end_address(end, buffer, 0, 0), 0};
}

/*
 * Irregular rows from the current run on, as addresses for the kernel: rows of it and of
 * following runs, as long as they are of one length and in the same buffers. A plan has
 * folded regular rows, so two rows of a run mean nothing here. This loop is the
 * processor's cost of a transfer of short rows: two addresses per row, no call. How many
 * rows; 0: they are not of that kind.
 */
static uint32_t scattered_rows(struct slice *s, uint64_t end)
{
	const struct plan *plan = s->at.plan;
	const struct plan_run *run = &plan->runs[s->at.run], first = *run;
	struct side src = copy_pipe_side_of(s, &s->job->src, run->src_buffer);
	struct side dst = copy_pipe_side_of(s, &s->job->dst, run->dst_buffer);
	uint64_t room_bytes = slice_room(s, end), bits = 0, linear = 0;
	struct kern_place *places;
	uint32_t room = 0, n = 0;

	if (s->at.row_offset || s->at.row || run->count >= SCATTERED_ROWS || s->engines ||
	    run->len * run->count > room_bytes)
		return 0;
	places = gpu_lane_places(s->lane, run->len, s->host, &room);
	if (!places)
		return 0;
	if (room > s->rows_most - s->rows)
		room = (uint32_t)(s->rows_most - s->rows);
	if (room > room_bytes / first.len)
		room = (uint32_t)(room_bytes / first.len);
	for (; s->at.run < plan->run_count; s->at.run++, run++) {
		uint64_t from = src.base + (src.step ? linear : run->src);
		uint64_t to = dst.base + (dst.step ? linear : run->dst);

		if (run->len != first.len || run->count >= SCATTERED_ROWS ||
		    run->count > room - n || run->src_buffer != first.src_buffer ||
		    run->dst_buffer != first.dst_buffer)
			break;
		for (uint64_t i = 0; i < run->count; i++) {
			places[n++] = (struct kern_place){.dst = to, .src = from};
			bits |= to | from;
			from += src.step ? first.len : (uint64_t)run->src_stride;
			to += dst.step ? first.len : (uint64_t)run->dst_stride;
		}
		linear += run->count * first.len;
	}
	gpu_lane_placed(s->lane, first.len, n, bits);
	s->pos += linear;
	return n;
}

static int rows_queue(struct slice *s, uint64_t end)
{
	struct gpu_rows rows;
	uint32_t placed = s->way == COPY_WAY_DIRECT ? scattered_rows(s, end) : 0;

	s->rows += placed;
	if (placed > 0)
		return 0;
	s->pos += rows_take(s, slice_room(s, end), &rows);
	s->rows += rows.count;
	if (s->way != COPY_WAY_DIRECT)
		return 0;
	return err_pass(gpu_lane_copy(s->lane, &rows));
}

/* Queue as much as possible of [begin, end): flight->end is the end of that. */
static int slice_rows(struct slice *s, uint64_t end)
{
	int r = plan_walk_seek(&s->at, s->job->plan, s->begin);

	while (r == 0 && s->pos < end && s->pos - s->begin < s->most &&
	       s->rows < s->rows_most && plan_walk_settle(&s->at)) {
		r = slice_look(s);
		if (r == 0)
			r = rows_queue(s, end);
		else if (r > 0)
			break;
	}
	return r < 0 ? err_pass(r) : 0;
}

/* Device memory on one end, a bounce buffer on the other: all of it linear. */
static int bounce_rows(struct copy_pipe *pipe, struct gpu_lane *lane,
		       const struct copy_job *part)
{
	struct slice s = {.pipe = pipe,
			  .lane = lane,
			  .pinned = true,
			  .job = part,
			  .begin = part->begin,
			  .pos = part->begin,
			  .most = part->end - part->begin,
			  .host_most = UINT64_MAX,
			  .rows_most = SLICE_ROWS};
	int r = 0;

	while (r == 0 && s.pos < part->end) {
		s.begin = s.pos;
		s.most = part->end - s.pos;
		s.rows = 0;
		r = slice_rows(&s, part->end);
	}
	return err_pass(r);
}

static int slice_in(struct copy_pipe *pipe, const struct slice *s, unsigned int index)
{
	struct copy_job part = part_of(s->job, s->begin, s->pos), half;
	struct copy_end bounce;
	int r = bounce_take(pipe, index, &bounce);

	if (r < 0)
		return err_pass(r);
	half = part;
	half.dst = bounce;
	r = copy_host(pipe->hand, &half);
	part.src = bounce;
	if (r == 0)
		r = bounce_rows(pipe, s->lane, &part);
	return err_pass(r);
}

static int slice_out(struct copy_pipe *pipe, const struct slice *s, unsigned int index)
{
	struct copy_job part = part_of(s->job, s->begin, s->pos);
	int r = bounce_take(pipe, index, &part.dst);

	if (r == 0)
		r = bounce_rows(pipe, s->lane, &part);
	return err_pass(r);
}

/* After a fault: copies queued without a mark must have ended, too. */
static int pipe_fault(struct copy_pipe *pipe)
{
	struct err why;

	err_take(&why);
	for (unsigned int i = 0; i < pipe->lane_count; i++)
		gpu_lane_drain(pipe->lanes[i]);
	return err_reraise(&why);
}

static bool job_pinned(const struct copy_pipe *pipe, const struct copy_job *job)
{
	const uint8_t *linear = !job->src.buffers ? job->src.linear : job->dst.linear;

	return (!job->src.buffers || !job->dst.buffers) &&
	       gpu_pin_ready(pipe->device, linear, job->end - job->begin);
}

/* ---- lists that stay on the device ---- */

/* False: not a list to keep, which needs device memory on both ends, all of it valid and
 * reachable by the kernel. */
static bool bases_take(const struct copy_pipe *pipe, const struct copy_end *end,
		       uint64_t *bases)
{
	for (uint32_t i = 0; i < end->buffer_count; i++) {
		struct memory *m = end->buffers[i].memory;

		bases[i] = 0;
		if (!m)
			continue;
		if (!of_device(m) || !memory_owner_alive(m) || !in_reach(pipe, m))
			return false;
		bases[i] = copy_end_address(end, i, 0, 0);
	}
	return true;
}

static bool key_take(const struct copy_pipe *pipe, const struct copy_job *job,
		     uint64_t begin, struct gpu_keep_key *key_p)
{
	const struct copy_end *src = &job->src, *dst = &job->dst;

	if (!pipe->bases || !job->seen || !src->buffers || !dst->buffers ||
	    (uint64_t)src->buffer_count + dst->buffer_count > GPU_KEEP_BASES)
		return false;
	*key_p = (struct gpu_keep_key){.plan = job->plan->serial,
				       .begin = begin,
				       .bases = pipe->bases,
				       .src_count = src->buffer_count,
				       .base_count =
					       src->buffer_count + dst->buffer_count};
	return bases_take(pipe, src, pipe->bases) &&
	       bases_take(pipe, dst, pipe->bases + src->buffer_count);
}

/* 0: the slice is queued by a list that was kept. 1: it is not. */
static int slice_again(struct slice *s, const struct gpu_keep_key *key, uint64_t end,
		       struct gpu_kept **kept_p)
{
	struct gpu_device *device = s->pipe->device;
	struct gpu_kept *kept = gpu_keep_find(device, key);
	int r = kept && kept->end <= end ? gpu_lane_again(s->lane, kept) : 1;

	if (r == 0) {
		s->pos = kept->end;
		s->way = COPY_WAY_DIRECT;
		*kept_p = kept;
		return 0;
	}
	gpu_keep_release(device, kept, true);
	return r < 0 ? err_pass(r) : r;
}

static int slice_queue(struct slice *s, unsigned int index, uint64_t end)
{
	int r = slice_rows(s, end);

	if (r == 0 && s->way == COPY_WAY_CPU) {
		const struct copy_job part = part_of(s->job, s->begin, s->pos);

		r = copy_host(s->pipe->hand, &part);
	} else if (r == 0 && s->way == COPY_WAY_IN) {
		r = slice_in(s->pipe, s, index);
	} else if (r == 0 && s->way == COPY_WAY_OUT) {
		r = slice_out(s->pipe, s, index);
	}
	return err_pass(r);
}

/* ---- flights ---- */

static int slice_begin(struct slice *s, unsigned int index, uint64_t end,
		       struct gpu_kept **kept_p)
{
	struct gpu_keep_key key;
	bool keeps = key_take(s->pipe, s->job, s->begin, &key);
	int r = keeps ? slice_again(s, &key, end, kept_p) : 1;

	if (r <= 0)
		return r < 0 ? err_pass(r) : 0;
	r = slice_queue(s, index, end);
	if (r < 0 || !keeps || s->way != COPY_WAY_DIRECT)
		return err_pass(r);
	*kept_p = gpu_keep_new(s->pipe->device, &key);
	if (*kept_p) {
		(*kept_p)->end = s->pos;
		gpu_lane_keep(s->lane, *kept_p);
	}
	return 0;
}

int copy_pipe_begin(struct copy_pipe *pipe, struct copy_job *job, uint64_t begin,
		    uint64_t end, uint64_t most, uint64_t *reached_p)
{
	const unsigned int depth = pipe->lane_count * GPU_LANE_SETS;
	unsigned int index = (pipe->first + pipe->count) % depth;
	struct copy_flight *flight = &pipe->flights[index];
	struct slice s = {.pipe = pipe,
			  .lane = lane_of(pipe, index),
			  .job = job,
			  .begin = begin,
			  .pos = begin,
			  .most = most < UINT64_MAX / SLICE_INSIDE_FACTOR
					  ? most * SLICE_INSIDE_FACTOR
					  : most,
			  .host_most = most,
			  .rows_most = pipe->count > 0 ? SLICE_ROWS : SLICE_ROWS_FIRST,
			  .pinned = job_pinned(pipe, job)};
	struct gpu_kept *kept = NULL;
	int r;

	assert(pipe->count < depth && begin < end);
	assert(!copy_pipe_full(pipe));
	if (pipe->bases && begin == job->begin)
		job->seen = gpu_keep_seen(pipe->device, job->plan->serial);
	r = slice_begin(&s, index, end, &kept);
	*flight = (struct copy_flight){
		.job = job, .begin = begin, .end = s.pos, .way = s.way, .kept = kept};
	if (r == 0)
		r = gpu_lane_mark(s.lane, &flight->mark);
	if (r < 0) {
		r = pipe_fault(pipe);
		gpu_keep_release(pipe->device, kept, false); /* nothing reads it now */
		return err_pass(r);
	}
	pipe->count++;
	*reached_p = s.pos;
	return 0;
}

int copy_pipe_end(struct copy_pipe *pipe, struct copy_flight *flight_p)
{
	unsigned int index = pipe->first;
	int r;

	assert(pipe->count > 0);
	*flight_p = pipe->flights[index];
	r = gpu_lane_wait(lane_of(pipe, index), flight_p->mark);
	if (r < 0)
		r = pipe_fault(pipe);
	gpu_keep_release(pipe->device, flight_p->kept, r == 0);
	if (r == 0 && flight_p->way == COPY_WAY_OUT) {
		struct copy_job part =
			part_of(flight_p->job, flight_p->begin, flight_p->end);

		r = bounce_take(pipe, index, &part.src);
		if (r == 0)
			r = copy_host(pipe->hand, &part);
	}
	pipe->first = (index + 1) % (pipe->lane_count * GPU_LANE_SETS);
	pipe->count--;
	return err_pass(r);
}

/* ---- opening ---- */

static int lanes_take(struct copy_pipe *pipe, unsigned int streams)
{
	int r = gpu_enter(pipe->device);

	if (r < 0)
		return err_pass(r);
	while (r == 0 && pipe->lane_count < streams) {
		r = gpu_lane_take(pipe->device, &pipe->lanes[pipe->lane_count]);
		pipe->lane_count += r == 0;
	}
	if (r < 0) {
		while (pipe->lane_count > 0)
			gpu_lane_give(pipe->lanes[--pipe->lane_count]);
		gpu_leave(pipe->device);
	}
	return err_pass(r);
}

int copy_pipe_open(struct copy_pipe *pipe, unsigned int streams)
{
	int r = gpu_device_get(pipe->device);

	assert(streams > 0);
	if (r < 0)
		return err_pass(r);
	pipe->first = pipe->count = 0;
	r = lanes_take(pipe, streams);
	if (r < 0) {
		struct err why;

		err_take(&why);
		gpu_device_put(pipe->device);
		return err_reraise(&why);
	}
	if (pipe->device->gpu->kernel_row_bytes > 0)
		gpu_module_want(pipe->device);
	return 0;
}

void copy_pipe_close(struct copy_pipe *pipe)
{
	while (pipe->lane_count > 0)
		gpu_lane_give(pipe->lanes[--pipe->lane_count]);
	gpu_leave(pipe->device);
	gpu_device_put(pipe->device);
}
