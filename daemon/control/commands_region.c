/* SPDX-License-Identifier: Apache-2.0 */
/*
 * region.* and pool.*: an engine registers memory and describes its layout.
 *
 * Registering and unregistering are answered later, when a helper, the last pin or the
 * last peer has finished; the request waits as the callback's argument. If the session
 * has ended by then, the reply is discarded.
 */
#include "daemon/request/commands.h"
#include "daemon/control/commands_pool.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/control/commands.h"
#include "proto/out.h"
#include "daemon/base/context.h"
#include "daemon/session/pool.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/session/session_watch.h"
#include "gpu/cudrv.h"
#include "proto/base64.h"

static void answer_empty(void *arg)
{
	request_reply(arg);
}

/* ---- region ---- */

static int kind_parse(const char *name, enum region_kind *kind_p)
{
	for (int kind = REGION_MEMFD; kind < REGION_KINDS; kind++) {
		if (strcmp(name, region_kind_name((enum region_kind)kind)) == 0) {
			*kind_p = (enum region_kind)kind;
			return 0;
		}
	}
	return err_raise(ERR_IMPORT,
			 "kind '%.32s': this daemon imports memfd, shm, vm, cuda_ipc, "
			 "cuda_vmm, dmabuf and file",
			 name);
}

/* Fields that locate memory of a kind. All others are refused. */
#define KIND(kind) (1u << REGION_##kind)
static const struct source_field {
	const char *name;
	unsigned int must, may; /* kinds that require it, or accept it */
} source_fields[] = {
	{"fd", KIND(MEMFD) | KIND(CUDA_VMM) | KIND(DMABUF) | KIND(FILE),
	 KIND(VM) | KIND(SHM)},
	{"shm_name", 0, KIND(SHM)},
	{"handle", KIND(CUDA_IPC), 0},
	{"device", KIND(CUDA_IPC) | KIND(CUDA_VMM), 0},
	{"allocation", KIND(CUDA_VMM), 0},
	{"offset", 0, ~KIND(VM)},
	{"address", KIND(VM) | KIND(FILE), ~KIND(VM)},
};

static int source_check(const cJSON *line, enum region_kind kind)
{
	for (size_t i = 0; i < ARRAY_LEN(source_fields); i++) {
		const struct source_field *field = &source_fields[i];
		bool there = cJSON_GetObjectItemCaseSensitive(line, field->name);

		if (!there && field->must & 1u << kind)
			return err_raise(ERR_INVAL, "%s: missing; required for kind %s",
					 field->name, region_kind_name(kind));
		if (there && !((field->must | field->may) & 1u << kind))
			return err_raise(ERR_INVAL, "%s: not allowed for kind %s",
					 field->name, region_kind_name(kind));
	}
	if (kind == REGION_SHM &&
	    !cJSON_GetObjectItemCaseSensitive(line, "fd") ==
		    !cJSON_GetObjectItemCaseSensitive(line, "shm_name"))
		return err_raise(ERR_INVAL,
				 "shm_name: kind shm requires exactly one of shm_name "
				 "and fd");
	return 0;
}

static void region_registered(void *arg, struct region *region, const struct err *err)
{
	struct request *req = arg;
	struct reply reply;
	struct text *out;

	if (!region) {
		request_fail(req, err);
		return;
	}
	out = reply_begin(&reply, req);
	out_number(out, "region", region->id);
	out_number(out, "bytes", region->length);
	out_text(out, "kind", region_kind_name(region->kind));
	out_bool(out, "writable", region->memory->writable);
	reply_end(&reply);
}

struct register_args {
	const char *kind, *handle;
	struct region_args region; /* without kind and ipc; its fd is an index */
	int statm;
};

/* A handle of CUDA IPC, in base64, to CU_IPC_BYTES. */
static int ipc_handle_parse(const char *text, uint8_t *handle)
{
	uint8_t bytes[BASE64_CHARS(CU_IPC_BYTES) / 4 * 3];
	size_t len = 0;

	if (strlen(text) != BASE64_CHARS(CU_IPC_BYTES) ||
	    !base64_decode(text, strlen(text), bytes, &len) || len != CU_IPC_BYTES)
		return err_raise(ERR_INVAL, "handle: must be base64 of %u bytes",
				 CU_IPC_BYTES);
	memcpy(handle, bytes, CU_IPC_BYTES);
	return 0;
}

static int region_register_run(struct request *req)
{
	const struct register_args *args = request_args(req);
	struct region_args region = args->region;
	uint8_t ipc[CU_IPC_BYTES];
	int r = kind_parse(args->kind, &region.kind);

	if (r == 0)
		r = source_check(req->line, region.kind);
	if (r == 0 && args->handle)
		r = ipc_handle_parse(args->handle, ipc);
	if (r == 0 && args->statm >= 0)
		r = session_watch_memory(req->session->watch, req->fds[args->statm]);
	if (r < 0)
		return err_pass(r);
	region.ipc = ipc;
	if (region.fd >= 0)
		region.fd = mem_steal_fd(&req->fds[args->region.fd]);
	r = region_register(req->session, &region, region_registered, req);
	if (r < 0 && region.fd >= 0)
		req->fds[args->region.fd] = region.fd;
	return err_pass(r);
}

static int region_unregister_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct region *region = region_find(req->session, args->id);

	if (!region)
		return err_pass(-ENOENT);
	return err_pass(region_unregister(region, answer_empty, req));
}

static void put_regions(struct text *out, const struct session *session,
			const struct request *req)
{
	struct idmap_cursor it;

	(void)req;
	idmap_foreach(&session->regions, it) {
		const struct region *region = it.value;

		if (sm_state(&region->sm) != REGION_READY)
			continue;
		out_object(out, NULL);
		out_number(out, "region", region->id);
		out_number(out, "session", session->id);
		out_text(out, "kind", region_kind_name(region->kind));
		out_number(out, "bytes", region->length);
		out_id(out, "address", region->address);
		out_bool(out, "writable", region->memory->writable);
		out_number(out, "registered", region->registered);
		out_number(out, "pins", region->pins);
		out_number(out, "pools", region->pools);
		out_text(out, "name", region->name);
		out_bool(out, "dead", !memory_owner_alive(region->memory));
		out_close(out, '}');
	}
}

static int region_list_run(struct request *req)
{
	return request_list(req, "regions", put_regions);
}

/* ---- pool ---- */

static int64_t pool_bytes(const struct pool *pool)
{
	int64_t bytes = 0;

	for (uint32_t i = 0; i < pool->layout->buffer_count; i++)
		bytes += pool->layout->buffers[i];
	return bytes;
}

static void pool_registered(void *arg, struct pool *pool, const struct err *err)
{
	struct request *req = arg;
	struct reply reply;
	struct text *out;

	if (!pool) {
		request_fail(req, err);
		return;
	}
	out = reply_begin(&reply, req);
	out_number(out, "pool", pool->id);
	out_number(out, "bytes", pool_bytes(pool));
	reply_end(&reply);
}

static int pool_register_run(struct request *req)
{
	struct pool_args args = *(const struct pool_args *)request_args(req);

	if (!args.name)
		args.name = "kv";
	if (!args.name[0])
		return err_raise(ERR_INVAL, "name: empty");
	return err_pass(pool_register(req->session, &args, pool_registered, req));
}

static int pool_unregister_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct pool *pool = pool_find(req->session, args->id);
	unsigned int rooms;

	if (!pool)
		return err_pass(-ENOENT);
	rooms = pool->rooms;
	MODULES_EACH(req->kvd, m)
	{
		if (m->pool_readings)
			rooms -= m->pool_readings(pool);
	}
	if (rooms)
		return err_raise(ERR_BUSY, "pool %ju: %u room%s it", (uintmax_t)pool->id,
				 rooms, rooms == 1 ? " uses" : "s use");
	pool_close(pool, answer_empty, req);
	return 0;
}

static void put_pools(struct text *out, const struct session *session,
		      const struct request *req)
{
	struct idmap_cursor it;

	(void)req;
	idmap_foreach(&session->pools, it) {
		const struct pool *pool = it.value;
		const struct layout *layout = pool->layout;

		if (pool->closing)
			continue;
		out_object(out, NULL);
		out_number(out, "pool", pool->id);
		out_text(out, "name", pool->name);
		out_number(out, "rank", layout->rank);
		out_number(out, "bytes", pool_bytes(pool));
		out_number(out, "rooms", pool->rooms);
		out_number(out, "session", session->id);
		out_array(out, "views");
		for (uint32_t i = 0; i < layout->view_count; i++)
			out_text(out, NULL, layout->views[i].name);
		out_close(out, ']');
		out_close(out, '}');
	}
}

static int pool_list_run(struct request *req)
{
	return request_list(req, "pools", put_pools);
}

/* ---- tables ---- */

static const struct field region_register_fields[] = {
	F_STR("kind", register_args, kind, REQUIRED, 32,
	      "\"memfd\", \"shm\" (POSIX name), \"vm\", \"cuda_ipc\", \"cuda_vmm\", "
	      "\"dmabuf\" or \"file\"."),
	F_FD("fd", register_args, region.fd,
	     "memfd: the descriptor; it must have F_SEAL_SHRINK or allow adding it. "
	     "shm: of unnamed memory, or of a memfd that cannot be sealed. cuda_vmm: "
	     "from cuMemExportToShareableHandle. dmabuf: from "
	     "cuMemGetHandleForAddressRange; only RDMA adapters can use it. vm: the "
	     "client's own /proc/self/mem, open for reading and writing; required if "
	     "the daemon runs as another user or does not see the process. file: a "
	     "regular file of a local file system, or a block device; only for "
	     "transfers of this session by address, not for pools."),
	F_STR("shm_name", register_args, region.shm_name, OPTIONAL, 255,
	      "shm: the name, \"/…\", if fd is not given."),
	F_STR("handle", register_args, handle, OPTIONAL, 128,
	      "cuda_ipc: the handle from cuIpcGetMemHandle for the allocation, 64 "
	      "bytes in base64."),
	F_STR("device", register_args, region.device, OPTIONAL, 63,
	      "cuda_ipc, cuda_vmm: the GPU, by UUID (\"GPU-…\") or PCI id. Device "
	      "numbers are not accepted."),
	F_U64("allocation", register_args, region.allocation, OPTIONAL,
	      "cuda_vmm: size of the whole allocation in bytes, as passed to "
	      "cuMemCreate."),
	F_U64("offset", register_args, region.offset, OPTIONAL,
	      "Byte offset of the region in the object, allocation or file; default 0. "
	      "Not for vm."),
	F_U64("length", register_args, region.length, REQUIRED,
	      "Length of the region in bytes."),
	F_U64("address", register_args, region.address, OPTIONAL,
	      "The client's address of the region's first byte. Required for vm; "
	      "otherwise needed only for transfers by address. file: required, a "
	      "number of at least 2^62, by which transfers address the file."),
	F_STR("name", register_args, region.name, OPTIONAL, 63,
	      "Name shown to operators; no effect."),
	F_FD("statm", register_args, statm,
	     "The client's own /proc/self/statm, by which the daemon detects that the "
	     "client's memory was freed before its process has exited. Only the first "
	     "one of a session is used."),
	F_END,
};

static const struct field region_fields[] = {
	F_ID("region", request_id_args, id, REQUIRED, "Id from region.register."),
	F_END,
};

static const struct field list_fields[] = {
	F_BOOL("all", request_list_args, all,
	       "Include all sessions (administrators only)."),
	F_END,
};

static const struct field pool_register_fields[] = {
	F_STR("name", pool_args, name, OPTIONAL, POOL_NAME_MAX - 1,
	      "Name of the pool; pools of equal names exchange data; default \"kv\"."),
	F_OBJECT("layout", pool_args, layout, REQUIRED,
		 "{rank, buffers, views}, see docs/internals/layouts.md."),
	F_ARRAY("regions", pool_args, regions, REQUIRED, LAYOUT_BUFFERS_MAX,
		"[{region, offset}], one per buffer of the layout."),
	F_END,
};

static const struct field pool_fields[] = {
	F_ID("pool", request_id_args, id, REQUIRED, "Id from pool.register."),
	F_END,
};

const struct command region_commands[] = {
	{"region.register",
	 "Register a region of memory. Registering the same memory again returns the "
	 "same id and increments its count",
	 region_register_fields, COMMAND_FDS, region_register_run,
	 "region, bytes, kind, writable; sent after the import has finished"},
	{"region.unregister", "Undo one registration; EBUSY while a pool uses the region",
	 region_fields, 0, region_unregister_run,
	 "nothing; sent when the memory is no longer in use"},
	{"region.list", "List the regions of this session, or of all", list_fields, 0,
	 region_list_run,
	 "regions [{region, session, kind, bytes, address, writable, registered, pins, "
	 "pools, name, dead}]"},
	{.name = NULL},
};

const struct command pool_commands[] = {
	{"pool.register", "Register a pool: the layout of a KV cache in regions",
	 pool_register_fields, 0, pool_register_run, "pool, bytes"},
	{"pool.unregister", "Unregister a pool; EBUSY while rooms use it", pool_fields, 0,
	 pool_unregister_run, "nothing; sent when no peer can access the pool any more"},
	{"pool.list", "List the pools of this session, or of all", list_fields, 0,
	 pool_list_run, "pools [{pool, name, rank, bytes, rooms, session, views}]"},
	{"pool.layout", "Show the layout of a pool", pool_layout_fields, 0,
	 pool_layout_run,
	 "pool, name, session, digest (equal for equal layouts), layout in the form of "
	 "pool.register"},
	{.name = NULL},
};
