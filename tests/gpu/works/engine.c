/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine as libkvd's user sees one: a client, one cache, transfers by lists of
 * rows and rooms of one page. Bytes of a GPU are looked at by the driver's own
 * copies, never by an address, so that nothing here works on the fake alone.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/gpu/works/works.h"

/* ---- memory ---- */

void region_ipc(struct kvd_client *client, uint64_t allocation, uint64_t offset,
		uint64_t bytes, struct kvd_region **region_p)
{
	struct cu_ipc_mem handle;
	const struct kvd_region_args args = {
		.kind = KVD_REGION_CUDA_IPC,
		.offset = offset,
		.bytes = bytes,
		.address = (const void *)(uintptr_t)(allocation + offset),
		.device = cuda.uuid,
		.ipc_handle = &handle,
	};

	cu(cuda.ipc_handle(&handle, allocation), "cuIpcGetMemHandle");
	well(client, kvd_region_register(client, &args, NULL, region_p),
	     "region.register");
}

static void memory_vmm(struct engine *e)
{
	const struct cu_mem_prop prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.handle_types = CU_MEM_HANDLE_TYPE_POSIX_FD,
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, cuda.device}};
	const struct cu_mem_access access = {.location = prop.location,
					     .flags = CU_MEM_ACCESS_READWRITE};
	uint64_t handle = 0;

	if (!cuda.drv.has[CUDRV_VMM])
		skip("this driver has no %s", cuda.drv.missing[CUDRV_VMM]);
	e->bytes = (e->bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
	cu(cuda.mem_create(&handle, e->bytes, &prop, 0), "cuMemCreate");
	cu(cuda.drv.vmm_reserve(&e->base, e->bytes, 0, 0, 0), "cuMemAddressReserve");
	cu(cuda.drv.vmm_map(e->base, e->bytes, 0, handle, 0), "cuMemMap");
	cu(cuda.drv.vmm_access(e->base, e->bytes, &access, 1), "cuMemSetAccess");
	cu(cuda.mem_export(&e->fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FD, 0),
	   "an fd of it");
	cu(cuda.drv.vmm_release(handle), "cuMemRelease");
}

void engine_memory(struct engine *e, enum where where, uint64_t bytes)
{
	*e = (struct engine){.where = where, .bytes = bytes, .fd = -1};
	if (where == AT_GPU_VMM) {
		memory_vmm(e);
	} else if (where == AT_GPU) {
		e->base = cuda_alloc(bytes);
	} else {
		well(NULL, kvd_memory_alloc(bytes, "works", &e->memory), "memory");
		e->base = (uintptr_t)e->memory.address;
		e->fd = e->memory.fd;
	}
}

int engine_register(struct engine *e)
{
	static const enum kvd_region_kind kinds[] = {
		KVD_REGION_CUDA_IPC, KVD_REGION_CUDA_VMM, KVD_REGION_MEMFD};
	struct cu_ipc_mem handle;
	struct kvd_region_args args = {.kind = kinds[e->where],
				       .fd = e->fd,
				       .bytes = e->bytes,
				       .address = (const void *)(uintptr_t)e->base};

	if (e->where != AT_HOST)
		args.device = cuda.uuid;
	if (e->where == AT_GPU_VMM)
		args.allocation = e->bytes;
	if (e->where == AT_GPU) {
		cu(cuda.ipc_handle(&handle, e->base), "cuIpcGetMemHandle");
		args.ipc_handle = &handle;
	}
	return kvd_region_register(e->client, &args, NULL, &e->region);
}

void engine_connect(struct engine *e, const struct rig *rig, unsigned int daemon)
{
	char socket[128];
	const struct kvd_options options = {
		.socket = socket, .client = "gpu-works", .timeout_ms = WAIT_MS};
	const struct timespec pause = {.tv_nsec = 2000000};
	double end = clock_s() + 30;
	int r;

	rig_socket(rig, daemon, socket);
	while ((r = kvd_open(&options, &e->client)) == -KVD_E_NODAEMON && clock_s() < end)
		nanosleep(&pause, NULL); /* it has only just been started */
	well(NULL, r, "kvd_open");
}

void engine_open(struct engine *e, const struct rig *rig, unsigned int daemon,
		 enum where where, uint64_t bytes)
{
	engine_memory(e, where, bytes);
	engine_connect(e, rig, daemon);
	well(e->client, engine_register(e), "region.register");
}

void engine_pool(struct engine *e, uint64_t page_bytes)
{
	struct kvd_field field = {.name = "kv", .unit_bytes = page_bytes, .units = 1};
	struct kvd_layout *layout = need(kvd_layout_new(0));
	struct kvd_pool_args args = {.regions = &e->region, .region_count = 1};

	e->page_bytes = page_bytes;
	e->pages = (uint32_t)(e->bytes / page_bytes);
	field.buffer = kvd_layout_buffer(layout, e->pages * page_bytes);
	kvd_layout_heads(layout, kvd_layout_view(layout, "kv", 1, e->pages), 0, KVD_NHD,
			 &field);
	well(NULL, kvd_layout_text(layout, &args.layout), "the layout");
	well(e->client, kvd_pool_register(e->client, &args, NULL, &e->pool),
	     "pool.register");
	kvd_layout_free(layout);
}

/* Nothing of the daemon's touches the memory after the region is gone. */
void engine_close(struct engine *e)
{
	if (e->pool)
		well(e->client, kvd_pool_unregister(e->pool, NULL), "pool.unregister");
	well(e->client, kvd_region_unregister(e->region, NULL), "region.unregister");
	kvd_close(e->client);
	if (e->where == AT_GPU)
		cu(cuda.mem_free(e->base), "cuMemFree");
	if (e->where == AT_GPU_VMM) {
		cu(cuda.drv.vmm_unmap(e->base, e->bytes), "cuMemUnmap");
		cu(cuda.drv.vmm_unreserve(e->base, e->bytes), "cuMemAddressFree");
		close(e->fd);
	}
	if (e->where == AT_HOST)
		kvd_memory_free(&e->memory);
}

/* Out of pageable memory the call returns when the bytes have been taken, not when they
 * are there; and who looks next is another process. */
void engine_put(struct engine *e, uint64_t offset, const void *data, uint64_t bytes)
{
	if (e->where == AT_HOST) {
		memcpy((uint8_t *)e->memory.address + offset, data, bytes);
		return;
	}
	cu(cuda.to_device(e->base + offset, data, bytes), "cuMemcpyHtoD");
	cu(cuda.drv.stream_sync(NULL), "cuStreamSynchronize");
}

void engine_get(struct engine *e, uint64_t offset, void *data, uint64_t bytes)
{
	if (e->where == AT_HOST)
		memcpy(data, (uint8_t *)e->memory.address + offset, bytes);
	else
		cu(cuda.to_host(data, e->base + offset, bytes), "cuMemcpyDtoH");
}

void engine_fill(struct engine *e, uint8_t byte)
{
	if (e->where == AT_HOST) {
		memset(e->memory.address, byte, e->bytes);
		return;
	}
	cu(cuda.fill(e->base, byte, e->bytes, cuda.stream), "cuMemsetD8Async");
	cuda_sync();
}

void engine_pattern(struct engine *e, uint64_t salt)
{
	uint64_t *words = need(malloc(e->bytes));

	for (uint64_t i = 0; i < e->bytes / sizeof(*words); i++)
		words[i] = (i + salt) * UINT64_C(0x9e3779b97f4a7c15);
	engine_put(e, 0, words, e->bytes / sizeof(*words) * sizeof(*words));
	free(words);
}

/* ---- transfers ---- */

uint64_t engine_attach(const struct engine *own, const struct engine *remote)
{
	struct kvd_session_key key;
	uint64_t id;

	well(remote->client, kvd_session_key(remote->client, 0, &key), "session.key");
	well(own->client,
	     kvd_peer_attach(own->client, kvd_daemon(remote->client)->endpoint, &key,
			     NULL, &id),
	     "peer.attach");
	return id;
}

static uint64_t random_next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static uint64_t *places(uint64_t bytes, uint64_t count, uint64_t within, uint64_t seed)
{
	uint64_t slots = within / bytes;
	uint64_t *at = need(calloc(slots, sizeof(*at)));

	if (slots < count)
		die("%ju rows do not fit", (uintmax_t)count);
	for (uint64_t i = 0; i < slots; i++)
		at[i] = i * bytes;
	for (uint64_t i = 0; i < count; i++) {
		uint64_t j = i + random_next(&seed) % (slots - i), t = at[i];

		at[i] = at[j];
		at[j] = t;
	}
	return at;
}

void rows_make(struct rows *rows, uint64_t bytes, uint64_t count, uint64_t within)
{
	*rows = (struct rows){.bytes = bytes, .count = count};
	rows->src = places(bytes, count, within, 0x1234567);
	rows->dst = places(bytes, count, within, 0x89abcde);
}

void rows_free(struct rows *rows)
{
	free(rows->src);
	free(rows->dst);
}

static int list_of(const struct engine *own, uint64_t attach, uint64_t base,
		   const uint64_t *at, const struct rows *rows,
		   const struct kvd_dlist **list_p)
{
	uint64_t *pairs = need(calloc(rows->count, 2 * sizeof(*pairs)));
	struct kvd_dlist *list = NULL;
	int r;

	for (uint64_t i = 0; i < rows->count; i++) {
		pairs[2 * i] = base + at[i];
		pairs[2 * i + 1] = rows->bytes;
	}
	r = kvd_dlist_prep(own->client, attach, pairs, rows->count, 2, &list);
	free(pairs);
	*list_p = list;
	return r;
}

int rows_xfer_try(const struct rows *rows, const struct engine *src,
		  const struct engine *dst, bool dst_asks, struct kvd_xfer **xfer_p)
{
	const struct engine *own = dst_asks ? dst : src, *remote = dst_asks ? src : dst;
	const char *endpoint = kvd_daemon(remote->client)->endpoint;
	struct kvd_xfer_args args = {.op = dst_asks ? KVD_READ : KVD_WRITE};
	struct kvd_session_key key;
	uint64_t attach = 0;
	int r;

	well(remote->client, kvd_session_key(remote->client, 0, &key), "session.key");
	r = kvd_peer_attach(own->client, endpoint, &key, NULL, &attach);
	if (!r)
		r = list_of(own, 0, own->base, dst_asks ? rows->dst : rows->src, rows,
			    &args.local);
	if (!r)
		r = list_of(own, attach, remote->base, dst_asks ? rows->src : rows->dst,
			    rows, &args.remote);
	return r ? r : kvd_xfer_make(own->client, &args, xfer_p);
}

struct kvd_xfer *rows_xfer(const struct rows *rows, const struct engine *src,
			   const struct engine *dst, bool dst_asks)
{
	struct kvd_xfer *xfer = NULL;

	well((dst_asks ? dst : src)->client,
	     rows_xfer_try(rows, src, dst, dst_asks, &xfer), "a transfer");
	return xfer;
}

double xfer_run(struct kvd_xfer *xfer)
{
	const struct timespec pause = {.tv_nsec = 5000};
	double begin = clock_s(), end = begin + WAIT_MS / 1000.0;
	struct kvd_error why = {0};
	int state;

	if (kvd_xfer_post(xfer, NULL, 0) < 0)
		die("kvd_xfer_post");
	while ((state = kvd_xfer_state(xfer)) != KVD_SUCCESS) {
		if (state < 0 || state == KVD_FAILED || clock_s() > end) {
			(void)kvd_xfer_error(xfer, 0, &why);
			die("the transfer %s: %s %s",
			    state == KVD_FAILED ? "failed" : "hangs",
			    kvd_code_name(why.code), why.message);
		}
		nanosleep(&pause, NULL);
	}
	return clock_s() - begin;
}

void rows_check(const struct rows *rows, struct engine *src, struct engine *dst)
{
	uint8_t *from = need(malloc(src->bytes)), *to = need(malloc(dst->bytes));

	engine_get(src, 0, from, src->bytes);
	engine_get(dst, 0, to, dst->bytes);
	for (uint64_t i = 0; i < rows->count; i++)
		if (memcmp(to + rows->dst[i], from + rows->src[i], rows->bytes) != 0)
			die("row %ju of %ju bytes differs", (uintmax_t)i,
			    (uintmax_t)rows->bytes);
	free(from);
	free(to);
}

/* ---- rooms ---- */

unsigned int room_waiting_ms;

/* A room may have failed since it was opened: who looks at its end learns why. */
static void well_or_over(const struct kvd_client *client, struct kvd_room *room, int r,
			 const char *what)
{
	if (r >= 0 || kvd_room_wait(room, KVD_SUCCESS, WAIT_MS) != KVD_FAILED)
		well(client, r, what);
}

struct kvd_room *room_recv(struct engine *dst, const struct engine *src, uint64_t number,
			   uint32_t page, const struct kvd_wait *wait)
{
	const struct kvd_source source = {.endpoint = kvd_daemon(src->client)->endpoint};
	const struct kvd_room_args args = {.room = number,
					   .role = KVD_RECV,
					   .pool = dst->pool,
					   .sources = &source,
					   .source_count = 1,
					   .waiting_ms = room_waiting_ms};
	const struct kvd_view view = {.pages = &page, .page_count = 1};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_room *room = NULL;

	if (wait)
		bind.wait = *wait;
	well(dst->client, kvd_room_open(dst->client, &args, NULL, &room), "room.open");
	well_or_over(dst->client, room, kvd_room_bind(room, &bind, NULL), "room.bind");
	return room;
}

struct kvd_room *room_send(struct engine *src, uint64_t number, uint32_t page,
			   const struct kvd_wait *wait)
{
	const struct kvd_room_args args = {.room = number,
					   .role = KVD_SEND,
					   .pool = src->pool,
					   .waiting_ms = room_waiting_ms};
	const struct kvd_view view = {.pages = &page, .page_count = 1};
	struct kvd_room_pages send = {.views = &view, .view_count = 1, .last = true};
	struct kvd_room *room = NULL;

	if (wait)
		send.wait = *wait;
	well(src->client, kvd_room_open(src->client, &args, NULL, &room), "room.open");
	well_or_over(src->client, room, kvd_room_send(room, &send, NULL), "room.send");
	return room;
}

int room_end(struct kvd_room *room)
{
	int state = kvd_room_wait(room, KVD_SUCCESS, WAIT_MS);

	if (state < 0)
		die("the room hangs");
	return state;
}

static void room_good(struct kvd_room *room)
{
	char *text = NULL;

	if (room_end(room) == KVD_SUCCESS)
		return;
	(void)kvd_room_show(room, 0, &text);
	die("the room failed: %s", text ? text : "?");
}

void room_done(struct kvd_room *send, struct kvd_room *recv)
{
	room_good(recv);
	room_good(send);
	if (kvd_room_close(send, NULL) < 0 || kvd_room_close(recv, NULL) < 0)
		die("room.close");
}

void room_failed(struct kvd_room *room, int code, const char *words)
{
	struct kvd_room_status status;
	char *text = NULL;

	if (room_end(room) != KVD_FAILED)
		die("the room did not fail");
	if (kvd_room_read(room, &status) < 0 || kvd_room_show(room, 0, &text) < 0)
		die("room.show");
	if (status.error != code || !strstr(text, words))
		die("%s instead of %s \"%s\": %s", kvd_code_name(status.error),
		    kvd_code_name(code), words, text);
	kvd_string_free(text);
	if (kvd_room_close(room, NULL) < 0)
		die("room.close");
}
