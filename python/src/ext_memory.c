/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that a daemon may use: regions and pools of one client, memfd-backed
 * memory, and memory that is adopted.
 *
 * A Region keeps the owner of its bytes (`keep`) alive until the daemon has answered
 * that it is unregistered. That includes a region that was only dropped, which is closed
 * in the background after its finaliser. If the bytes were freed sooner, a daemon that
 * copies by address (`vm`) could write into a later allocation.
 *
 * Adopting needs the pointer that malloc returned, which a caller that aligned its
 * buffer, or took a view of an array, does not have. chunk_of() searches for it: the
 * header of a chunk that glibc mapped is at the start of a page, and an aligned buffer
 * starts at most 2 MiB after it. kvd_adopt() then checks the chunk as it checks any.
 */
#include "python/src/ext.h"

#include <string.h>
#include <unistd.h>

#include "lib/client_adopt.h"

#define IPC_HANDLE_BYTES 64		     /* CUipcMemHandle */
#define CHUNK_BYTES_MIN (UINT64_C(32) << 20) /* as kvd_adopt() */
#define CHUNK_PAGES_BACK 513u		     /* 2 MiB of alignment, and the header's */

PyTypeObject *region_type, *pool_type;

/* ---- regions --------------------------------------------------------------------- */

struct region_start {
	struct client *c;
	struct kvd_region_args args;
	struct kvd_region *kvd;
};

static int region_begin(void *ctx, const struct kvd_call *call)
{
	struct region_start *s = ctx;

	return kvd_region_register(s->c->kvd, &s->args, call, &s->kvd);
}

static int region_shut(void *handle, const struct kvd_call *call)
{
	return kvd_region_unregister(handle, call);
}

static const struct {
	const char *name;
	enum kvd_region_kind kind;
} kinds[] = {
	{"memfd", KVD_REGION_MEMFD},
	{"shm", KVD_REGION_SHM},
	{"vm", KVD_REGION_VM},
	{"cuda_ipc", KVD_REGION_CUDA_IPC},
	{"cuda_vmm", KVD_REGION_CUDA_VMM},
	{"file", KVD_REGION_FILE},
};

static int region_kind(const char *kind, enum kvd_region_kind *kind_p)
{
	for (unsigned int i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		if (strcmp(kinds[i].name, kind) == 0) {
			*kind_p = kinds[i].kind;
			return (int)i;
		}
	}
	PyErr_Format(PyExc_ValueError,
		     "kind: '%s' is not memfd, shm, vm, cuda_ipc, cuda_vmm or file",
		     kind);
	return -1;
}

/* The handle is passed to the daemon unchanged, with the size that the driver returns. */
static int region_handle(struct kvd_region_args *args, const char *handle,
			 Py_ssize_t length)
{
	if (handle && length != IPC_HANDLE_BYTES) {
		PyErr_Format(PyExc_ValueError, "handle: %zd bytes instead of %d", length,
			     IPC_HANDLE_BYTES);
		return -1;
	}
	args->ipc_handle = handle;
	return 0;
}

static PyObject *region_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"client",  "kind",     "bytes",	 "address",    "fd",
				"offset",  "shm_name", "name",	 "keep",       "timeout",
				"on_done", "device",   "handle", "allocation", NULL};
	struct region_start start = {.args = {.fd = -1}};
	struct run run = {.start = region_begin, .ctx = &start};
	unsigned long long bytes, address = 0, offset = 0, allocation = 0;
	PyObject *keep = NULL, *client;
	const char *kind, *handle = NULL;
	struct region *region;
	Py_ssize_t length = 0;
	int k, r;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!sK|KiKzzOO&Ozz#K", names,
					 client_type, &client, &kind, &bytes, &address,
					 &start.args.fd, &offset, &start.args.shm_name,
					 &start.args.name, &keep, ext_timeout,
					 &run.timeout_ms, &run.told, &start.args.device,
					 &handle, &length, &allocation) ||
	    (k = region_kind(kind, &start.args.kind)) < 0 ||
	    region_handle(&start.args, handle, length) < 0)
		return NULL;
	start.args.allocation = allocation;
	region = (struct region *)handle_new(type, (struct client *)client, "region",
					     keep);
	if (!region)
		return NULL;
	start.c = run.client = region->h.client;
	start.args.bytes = bytes;
	start.args.offset = offset;
	start.args.address = (const void *)(uintptr_t)address;
	region->address = address;
	region->bytes = bytes;
	region->kind = kinds[k].name;
	r = client_run(&run, NULL);
	return handle_made(&region->h, start.kvd, r);
}

bool region_usable(const struct region *region, const struct client *client,
		   const char *argument, Py_ssize_t index)
{
	const char *why = !region->h.kvd	       ? "not registered any more"
			  : region->h.client != client ? "belongs to another client"
						       : NULL;

	if (why)
		PyErr_Format(PyExc_ValueError, "%s[%zd]: %s", argument, index, why);
	return !why;
}

static PyObject *region_unregister(PyObject *self, PyObject *args, PyObject *kwargs)
{
	return handle_close(self, args, kwargs, region_shut, false);
}

static void region_dealloc(PyObject *self)
{
	handle_dealloc(self, region_shut);
}

static PyObject *region_get_id(PyObject *self, void *Py_UNUSED(closure))
{
	struct handle *region = (struct handle *)self;

	return PyLong_FromUnsignedLongLong(
		handle_is_open(region) ? kvd_region_id(region->kvd) : 0);
}

static PyMethodDef region_methods[] = {
	{"unregister", (PyCFunction)(void (*)(void))region_unregister,
	 METH_VARARGS | METH_KEYWORDS,
	 "unregister(timeout=None)\n\nThe daemon stops using the memory. BusyError "
	 "while a pool uses it."},
	{NULL, NULL, 0, NULL},
};
static PyMemberDef region_members[] = {
	{"address", T_ULONGLONG, offsetof(struct region, address), READONLY,
	 "Address in this process."},
	{"bytes", T_ULONGLONG, offsetof(struct region, bytes), READONLY,
	 "Length in bytes."},
	{"kind", T_STRING, offsetof(struct region, kind), READONLY,
	 "Kind of memory: memfd, shm, vm, cuda_ipc or cuda_vmm."},
	{NULL, 0, 0, 0, NULL},
};
static PyGetSetDef region_getset[] = {
	{"id", region_get_id, NULL,
	 "Region id in the daemon; 0 while it is not registered.", NULL},
	{NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot region_slots[] = {
	{Py_tp_doc,
	 (void *)"Memory registered with the daemon, as by Client.register()."},
	{Py_tp_new, region_make},
	{Py_tp_dealloc, region_dealloc},
	{Py_tp_methods, region_methods},
	{Py_tp_members, region_members},
	{Py_tp_getset, region_getset},
	{0, NULL},
};

/* ---- pools ------------------------------------------------------------------------ */

struct pool_start {
	struct client *c;
	struct kvd_pool_args args;
	struct kvd_region **regions;
	uint64_t *offsets;
	struct kvd_pool *kvd;
};

static int pool_begin(void *ctx, const struct kvd_call *call)
{
	struct pool_start *s = ctx;

	return kvd_pool_register(s->c->kvd, &s->args, call, &s->kvd);
}

static int pool_shut(void *handle, const struct kvd_call *call)
{
	return kvd_pool_unregister(handle, call);
}

bool pool_usable(PyObject *pool, const struct client *client)
{
	const struct handle *h = (struct handle *)pool;
	const char *why = NULL;

	if (Py_TYPE(pool) != pool_type)
		why = "not a kvd.Pool";
	else if (h->client != client)
		why = "belongs to another client";
	else if (!h->kvd)
		why = "not registered any more";
	if (why)
		PyErr_Format(PyExc_ValueError, "pool: %s", why);
	return !why;
}

/* parts: a tuple of (Region, offset) */
static int pool_parts(struct pool_start *s, PyObject *parts, struct use *uses)
{
	for (size_t i = 0; i < s->args.region_count; i++) {
		unsigned long long offset;
		PyObject *region;

		if (!PyArg_ParseTuple(PyTuple_GetItem(parts, (Py_ssize_t)i), "O!K",
				      region_type, &region, &offset) ||
		    !region_usable((struct region *)region, s->c, "regions",
				   (Py_ssize_t)i))
			return -1;
		uses[i] = (struct use){(struct handle *)region, &s->regions[i]};
		s->offsets[i] = offset;
	}
	return 0;
}

static PyObject *pool_made(PyTypeObject *type, struct pool_start *start, PyObject *parts,
			   struct run *run)
{
	struct handle *pool = handle_new(type, start->c, "pool", parts);
	int r;

	if (!pool)
		return NULL;
	r = client_run(run, NULL);
	return handle_made(pool, start->kvd, r);
}

static PyObject *pool_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"client",  "name",    "layout", "regions",
				"timeout", "on_done", NULL};
	struct pool_start start = {0};
	struct run run = {.start = pool_begin, .ctx = &start};
	PyObject *client, *parts, *pool = NULL;
	struct use *uses;
	size_t count;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!zsO!|O&O", names, client_type,
					 &client, &start.args.name, &start.args.layout,
					 &PyTuple_Type, &parts, ext_timeout,
					 &run.timeout_ms, &run.told))
		return NULL;
	count = (size_t)PyTuple_Size(parts);
	uses = mem_calloc(count + 1, sizeof(*uses));
	start.regions = mem_calloc(count + 1, sizeof(*start.regions));
	start.offsets = mem_calloc(count + 1, sizeof(*start.offsets));
	start.c = run.client = (struct client *)client;
	start.args.regions = start.regions;
	start.args.offsets = start.offsets;
	start.args.region_count = run.use_count = count;
	run.uses = uses;
	if (!uses || !start.regions || !start.offsets)
		PyErr_NoMemory();
	else if (pool_parts(&start, parts, uses) == 0)
		pool = pool_made(type, &start, parts, &run);
	mem_free(uses);
	mem_free(start.regions);
	mem_free(start.offsets);
	return pool;
}

static PyObject *pool_unregister(PyObject *self, PyObject *args, PyObject *kwargs)
{
	return handle_close(self, args, kwargs, pool_shut, false);
}

static void pool_dealloc(PyObject *self)
{
	handle_dealloc(self, pool_shut);
}

static PyObject *pool_get_id(PyObject *self, void *Py_UNUSED(what))
{
	struct handle *pool = (struct handle *)self;

	return PyLong_FromUnsignedLongLong(handle_is_open(pool) ? kvd_pool_id(pool->kvd)
								: 0);
}

static PyMethodDef pool_methods[] = {
	{"unregister", (PyCFunction)(void (*)(void))pool_unregister,
	 METH_VARARGS | METH_KEYWORDS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyGetSetDef pool_getset[] = {
	{"id", pool_get_id, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot pool_slots[] = {
	{Py_tp_new, pool_make},
	{Py_tp_dealloc, pool_dealloc},
	{Py_tp_methods, pool_methods},
	{Py_tp_getset, pool_getset},
	{0, NULL},
};

/* ---- memory ------------------------------------------------------------------------ */

static PyObject *memory_alloc(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct kvd_memory memory = {.fd = -1};
	const char *name = "kvd-python";
	unsigned long long bytes;
	int r;

	if (!PyArg_ParseTuple(args, "K|s", &bytes, &name))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_memory_alloc((size_t)bytes, name, &memory);
	Py_END_ALLOW_THREADS if (r < 0) return ext_raise(kvd_last_error(NULL));
	return Py_BuildValue(
		"(iKKK)", memory.fd, (unsigned long long)(uintptr_t)memory.address,
		(unsigned long long)memory.bytes, (unsigned long long)memory.huge_bytes);
}

static PyObject *memory_free(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned long long address, bytes, huge;
	struct kvd_memory memory;

	if (!PyArg_ParseTuple(args, "iKKK", &memory.fd, &address, &bytes, &huge))
		return NULL;
	memory.address = (void *)(uintptr_t)address;
	memory.bytes = (size_t)bytes;
	memory.huge_bytes = (size_t)huge;
	kvd_memory_free(&memory);
	Py_RETURN_NONE;
}

static PyObject *adopt(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct kvd_adopt_args a = {0};
	struct kvd_adopted got;
	unsigned long long address, bytes;
	int quiet = 0, vouched = 0, r;

	if (!PyArg_ParseTuple(args, "KK|pp", &address, &bytes, &quiet, &vouched))
		return NULL;
	a.address = (void *)(uintptr_t)address;
	a.bytes = (size_t)bytes;
	a.quiet = quiet;
	a.vouched = vouched;
	Py_BEGIN_ALLOW_THREADS r = kvd_adopt(&a, &got);
	Py_END_ALLOW_THREADS if (r < 0) return ext_raise(kvd_last_error(NULL));
	return Py_BuildValue("{s:K,s:K,s:K,s:i,s:K}", "id", (unsigned long long)got.id,
			     "bytes", (unsigned long long)got.bytes, "huge",
			     (unsigned long long)got.huge_bytes, "moved", (int)got.moved,
			     "address", (unsigned long long)(uintptr_t)got.address);
}

struct chunk {
	uint64_t begin, end; /* of the readable range without a gap */
};

/* madvise() has split areas: a chunk may lie in several. */
static int on_area(void *arg, const struct maps_area *area)
{
	struct chunk *chunk = arg;
	bool usable = area->readable && !area->shared && !area->inode;

	if (!usable || area->begin != chunk->end)
		chunk->begin = usable ? area->begin : area->end;
	chunk->end = area->end;
	return 0;
}

/* Is this the header of a chunk that malloc mapped, around [address, +bytes)? Headers lie
 * outside of malloc's allocations, so the sanitizer is not asked. */
__attribute__((no_sanitize("address"))) static uint64_t chunk_at(uint64_t at,
								 uint64_t page,
								 uint64_t address,
								 uint64_t bytes)
{
	const volatile uint64_t *w = (const volatile uint64_t *)(uintptr_t)at;
	uint64_t before = w[0], size = w[1] & ~UINT64_C(7);

	if (before != 0 || (w[1] & 7) != 2 || size % page || size < CHUNK_BYTES_MIN ||
	    size > UINT64_MAX - at || address < at + 16 || address - at > size ||
	    bytes > size - (address - at))
		return 0;
	return size;
}

/* The payload of that chunk: its header is at the start of a page shortly before. */
static bool chunk_find(uint64_t address, uint64_t bytes, uint64_t *at_p,
		       uint64_t *bytes_p)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), at = address / page * page, size;
	uint64_t back = CHUNK_PAGES_BACK * page;
	struct chunk area = {0};

	if (maps_each(at > back ? at - back : 0, address + 1, on_area, &area) < 0 ||
	    area.end <= address)
		return false;
	for (unsigned int i = 0; i < CHUNK_PAGES_BACK && at >= area.begin;
	     i++, at -= page) {
		size = chunk_at(at, page, address, bytes);
		if (size) {
			*at_p = at + 16;
			*bytes_p = size - 16;
			return true;
		}
	}
	return false;
}

static PyObject *chunk_of(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned long long address, bytes;
	uint64_t at = 0, length = 0;

	if (!PyArg_ParseTuple(args, "KK", &address, &bytes))
		return NULL;
	if (!chunk_find(address, bytes, &at, &length))
		Py_RETURN_NONE;
	return Py_BuildValue("(KK)", (unsigned long long)at, (unsigned long long)length);
}

static PyMethodDef functions[] = {
	{"memory_alloc", memory_alloc, METH_VARARGS, NULL},
	{"memory_free", memory_free, METH_VARARGS, NULL},
	{"adopt", adopt, METH_VARARGS, NULL},
	{"chunk_of", chunk_of, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_memory_init(PyObject *module)
{
	region_type =
		ext_type(module, "kvd._kvd.Region", sizeof(struct region), region_slots);
	pool_type = ext_type(module, "kvd._kvd.Pool", sizeof(struct handle), pool_slots);
	if (!region_type || !pool_type)
		return -1;
	return PyModule_AddFunctions(module, functions);
}
