/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms. Python (kvd/rooms.py) converts page lists and sources into plain tuples;
 * this file converts them into libkvd's structs for one call.
 *
 *   view    (name or None, pages as bytes of u32, first_token, token_begin,
 *            token_end, layer_begin, layer_end, select as pages or None)
 *   source  (endpoint or None, pool or None, room or None, rank or None, views)
 *   wait    (Region, offset, value) or None
 *
 * The caller's tuples hold the bytes objects during the call, and libkvd copies what it
 * keeps.
 */
#include "python/src/ext.h"

#include <string.h>

static PyTypeObject *room_type;

struct room {
	struct handle h; /* keep: its pool */
	bool post;	 /* its calls are */
};

void ext_views_fini(struct ext_views *views)
{
	mem_free(views->at);
	views->at = NULL;
}

int ext_views_parse(PyObject *tuple, struct ext_views *views)
{
	Py_ssize_t n = tuple && tuple != Py_None ? PyTuple_Size(tuple) : 0;

	*views = (struct ext_views){.count = (size_t)n};
	if (n < 0)
		return -1;
	views->at = mem_calloc((size_t)n + 1, sizeof(*views->at));
	if (!views->at) {
		PyErr_NoMemory();
		return -1;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		struct kvd_view *v = &views->at[i];
		unsigned long long first, begin, end;
		const char *pages, *select;
		Py_ssize_t bytes, select_bytes;

		if (!PyArg_ParseTuple(PyTuple_GetItem(tuple, i), "zy#KKKIIz#", &v->name,
				      &pages, &bytes, &first, &begin, &end,
				      &v->layer_begin, &v->layer_end, &select,
				      &select_bytes))
			return -1;
		v->select = (const uint32_t *)(const void *)select;
		v->select_count = select ? (size_t)select_bytes / sizeof(uint32_t) : 0;
		v->pages = (const uint32_t *)(const void *)pages;
		v->page_count = (size_t)bytes / sizeof(uint32_t);
		v->first_token = first;
		v->token_begin = begin;
		v->token_end = end;
	}
	return 0;
}

int ext_wait_parse(const struct client *client, PyObject *tuple, struct kvd_wait *wait,
		   struct use *use_p)
{
	unsigned long long offset, value;
	PyObject *region;

	memset(wait, 0, sizeof(*wait));
	*use_p = (struct use){NULL, NULL};
	if (!tuple || tuple == Py_None)
		return 0;
	if (!PyArg_ParseTuple(tuple, "O!KK", region_type, &region, &offset, &value))
		return -1;
	if (!region_usable((struct region *)region, client, "wait", 0))
		return -1;
	*use_p = (struct use){(struct handle *)region, &wait->region};
	wait->offset = offset;
	wait->value = value;
	return 0;
}

/* None: absent. 1: given, 0: not, -1: an exception. */
static int number_parse(PyObject *value, uint64_t *number_p)
{
	if (!value || value == Py_None)
		return 0;
	*number_p = PyLong_AsUnsignedLongLong(value);
	return PyErr_Occurred() ? -1 : 1;
}

struct sources {
	struct kvd_source *at;
	struct ext_views *views;
	size_t count;
};

static void sources_fini(struct sources *s)
{
	for (size_t i = 0; s->views && i < s->count; i++)
		ext_views_fini(&s->views[i]);
	mem_free(s->views);
	mem_free(s->at);
}

static int source_parse(PyObject *tuple, struct kvd_source *s, struct ext_views *views)
{
	PyObject *room, *rank, *view_list;
	unsigned long long session;
	uint64_t number = 0;
	int r;

	if (!PyArg_ParseTuple(tuple, "zzOOOzz(IIII)K", &s->endpoint, &s->pool, &room,
			      &rank, &view_list, &s->group, &s->worker, &s->tp_rank,
			      &s->pp_rank, &s->dp_rank, &s->cp_rank, &session))
		return -1;
	s->session = session;
	r = number_parse(room, &s->room);
	s->another_room = r == 1;
	if (r >= 0)
		r = number_parse(rank, &number);
	s->has_rank = r == 1;
	s->rank = (uint32_t)number;
	if (r >= 0)
		r = ext_views_parse(view_list, views);
	s->views = views->at;
	s->view_count = views->count;
	return r < 0 ? -1 : 0;
}

static int sources_parse(PyObject *tuple, struct sources *s)
{
	Py_ssize_t n = tuple && tuple != Py_None ? PyTuple_Size(tuple) : 0;

	*s = (struct sources){.count = n > 0 ? (size_t)n : 0};
	s->at = mem_calloc(s->count + 1, sizeof(*s->at));
	s->views = mem_calloc(s->count + 1, sizeof(*s->views));
	if (!s->at || !s->views) {
		PyErr_NoMemory();
		return -1;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		if (source_parse(PyTuple_GetItem(tuple, i), &s->at[i], &s->views[i]) < 0)
			return -1;
	}
	return n < 0 ? -1 : 0;
}

/* Names, owned by the tuple. */
int ext_names_parse(PyObject *tuple, const char ***names_p, size_t *count_p)
{
	Py_ssize_t n = tuple && tuple != Py_None ? PyTuple_Size(tuple) : 0;

	if (n < 0)
		return -1;
	*names_p = mem_calloc((size_t)n + 1, sizeof(**names_p));
	if (!*names_p) {
		PyErr_NoMemory();
		return -1;
	}
	for (Py_ssize_t i = 0; i < n; i++) {
		if (!PyArg_Parse(PyTuple_GetItem(tuple, i), "s", &(*names_p)[i]))
			return -1;
	}
	*count_p = (size_t)n;
	return 0;
}

/* ---- opening ----------------------------------------------------------------------- */

struct open_start {
	struct client *c;
	struct kvd_room_args args;
	struct kvd_room *kvd;
};

static int open_begin(void *ctx, const struct kvd_call *call)
{
	struct open_start *s = ctx;

	return kvd_room_open(s->c->kvd, &s->args, call, &s->kvd);
}

void ext_on_nothing(void *Py_UNUSED(arg), int result, const struct kvd_reply *reply)
{
	(void)result;
	(void)reply;
}

/* A room that was dropped while running is aborted first, and closed when quiesced. */
static int room_shut(void *handle, const struct kvd_call *call)
{
	int state = kvd_room_state(handle);
	struct kvd_call nobody = {.on_done = ext_on_nothing};

	if (state == KVD_FAILED || state == KVD_SUCCESS || state < 0)
		return kvd_room_close(handle, call);
	kvd_room_abort(handle, "its handle was dropped", &nobody);
	return -KVD_E_STATE; /* retried in the next turn */
}

/* The first one creates the memory shared with the daemon: others run meanwhile. */
static int room_prepare(struct client *c)
{
	int r;

	if (!client_lock(c))
		return -1;
	Py_BEGIN_ALLOW_THREADS r = kvd_xfer_prepare(c->kvd);
	Py_END_ALLOW_THREADS client_end(c, r);
	return r;
}

static PyObject *room_made(PyTypeObject *type, struct open_start *start, PyObject *pool,
			   const struct run *run)
{
	struct room *room = (struct room *)handle_new(type, start->c, "room", pool);
	int r;

	if (!room)
		return NULL;
	room->h.number = start->args.room;
	room->post = run->post;
	r = run->post ? room_prepare(start->c) : 0;
	if (r >= 0)
		r = client_run(run, NULL);
	return handle_made(&room->h, start->kvd, r);
}

static PyObject *room_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {
		"client",      "room",	    "role",	    "pool",
		"sources",     "receivers", "views",	    "aux",
		"wait",	       "lease_ms",  "bootstrap_ms", "waiting_ms",
		"stall_ms",    "timeout",   "on_done",	    "request_id",
		"traceparent", "ticket",    "peers",	    "receivers_from_pullers",
		"post",	       NULL};
	struct open_start start = {0};
	struct kvd_room_args *a = &start.args;
	struct use uses[2];
	struct run run = {
		.start = open_begin, .ctx = &start, .uses = uses, .use_count = 2};
	PyObject *client, *pool, *source_list = NULL, *view_list = NULL, *aux = NULL;
	PyObject *wait = NULL, *room = NULL, *peers = NULL;
	const char **names_of_peers = NULL;
	struct sources sources = {0};
	struct ext_views views = {0};
	unsigned long long number;
	uint64_t slot = 0;
	int role, receivers_from_pullers = 0, post = 0, r = -1;

	if (!PyArg_ParseTupleAndKeywords(
		    args, kwargs, "O!KiO!|OIOOOIIIIO&OzzzOpp", names, client_type,
		    &client, &number, &role, pool_type, &pool, &source_list,
		    &a->receivers, &view_list, &aux, &wait, &a->lease_ms,
		    &a->bootstrap_ms, &a->waiting_ms, &a->stall_ms, ext_timeout,
		    &run.timeout_ms, &run.told, &a->request_id, &a->traceparent,
		    &a->ticket, &peers, &receivers_from_pullers, &post))
		return NULL;
	start.c = run.client = (struct client *)client;
	run.post = post;
	a->room = number;
	a->role = (enum kvd_role)role;
	a->receivers_from_pullers = receivers_from_pullers;
	uses[0] = (struct use){(struct handle *)pool, &a->pool};
	if (pool_usable(pool, start.c))
		r = number_parse(aux, &slot);
	a->has_aux = r == 1;
	a->aux = (uint32_t)slot;
	if (r >= 0 && sources_parse(source_list, &sources) == 0 &&
	    ext_views_parse(view_list, &views) == 0 &&
	    ext_wait_parse(start.c, wait, &a->wait, &uses[1]) == 0 &&
	    ext_names_parse(peers, &names_of_peers, &a->peer_count) == 0) {
		a->peers = names_of_peers;
		a->sources = sources.at;
		a->source_count = sources.count;
		a->views = views.at;
		a->view_count = views.count;
		room = room_made(type, &start, pool, &run);
	}
	sources_fini(&sources);
	ext_views_fini(&views);
	mem_free(names_of_peers);
	return room;
}

static void room_dealloc(PyObject *self)
{
	handle_dealloc(self, room_shut);
}

/* ---- bind, send, abort, close ---------------------------------------------------------
 */

struct call_start {
	struct kvd_room *kvd;
	struct kvd_room_pages pages; /* of a bind, too */
	const char *reason;
	unsigned int lease_ms;
};

static int extend_begin(void *ctx, const struct kvd_call *call)
{
	struct call_start *s = ctx;

	return kvd_room_extend(s->kvd, s->lease_ms, call);
}

static int bind_begin(void *ctx, const struct kvd_call *call)
{
	struct call_start *s = ctx;

	return kvd_room_bind(s->kvd, &s->pages, call);
}

static int send_begin(void *ctx, const struct kvd_call *call)
{
	struct call_start *s = ctx;

	return kvd_room_send(s->kvd, &s->pages, call);
}

static int abort_begin(void *ctx, const struct kvd_call *call)
{
	struct call_start *s = ctx;

	return kvd_room_abort(s->kvd, s->reason, call);
}

/* One call of a room, with the object that its `wait` names. */
struct room_call {
	struct call_start start;
	struct use uses[2];
	struct run run;
};

static void room_call_init(struct room_call *call, PyObject *self, op_start *begin)
{
	struct room *room = (struct room *)self;

	*call = (struct room_call){
		.uses = {{&room->h, &call->start.kvd}},
		.run = {.client = room->h.client,
			.start = begin,
			.ctx = &call->start,
			.uses = call->uses,
			.use_count = 2,
			.post = room->post},
	};
}

/* None if it could be started. */
static PyObject *room_run(struct room_call *call)
{
	if (!handle_usable(call->uses[0].of) || client_run(&call->run, NULL) < 0)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *pages_run(struct room_call *call, PyObject *view_list, PyObject *aux,
			   PyObject *wait)
{
	struct kvd_room_pages *a = &call->start.pages;
	struct ext_views views = {0};
	PyObject *done = NULL;
	uint64_t slot = 0;
	int r;

	if (ext_views_parse(view_list, &views) == 0 &&
	    ext_wait_parse(call->run.client, wait, &a->wait, &call->uses[1]) == 0 &&
	    (r = number_parse(aux, &slot)) >= 0) {
		a->views = views.at;
		a->view_count = views.count;
		a->has_aux = r == 1;
		a->aux = (uint32_t)slot;
		done = room_run(call);
	}
	ext_views_fini(&views);
	return done;
}

static PyObject *room_bind(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"views", "aux", "wait", "timeout", "on_done", NULL};
	PyObject *view_list, *aux = NULL, *wait = NULL;
	struct room_call call;

	room_call_init(&call, self, bind_begin);
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OOO&O", names, &view_list, &aux,
					 &wait, ext_timeout, &call.run.timeout_ms,
					 &call.run.told))
		return NULL;
	return pages_run(&call, view_list, aux, wait);
}

static PyObject *room_send(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"seq",	"views",   "last",    "aux",
				"wait", "timeout", "on_done", NULL};
	PyObject *view_list, *aux = NULL, *wait = NULL;
	unsigned long long seq;
	struct room_call call;
	int last = 0;

	room_call_init(&call, self, send_begin);
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KO|pOOO&O", names, &seq,
					 &view_list, &last, &aux, &wait, ext_timeout,
					 &call.run.timeout_ms, &call.run.told))
		return NULL;
	call.start.pages.seq = seq;
	call.start.pages.last = last;
	return pages_run(&call, view_list, aux, wait);
}

static PyObject *room_extend(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"lease_ms", "timeout", "on_done", NULL};
	struct room_call call;

	room_call_init(&call, self, extend_begin);
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I|O&O", names,
					 &call.start.lease_ms, ext_timeout,
					 &call.run.timeout_ms, &call.run.told))
		return NULL;
	return room_run(&call);
}

static PyObject *room_abort(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"reason", "timeout", "on_done", NULL};
	struct room_call call;

	room_call_init(&call, self, abort_begin);
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zO&O", names, &call.start.reason,
					 ext_timeout, &call.run.timeout_ms,
					 &call.run.told))
		return NULL;
	return room_run(&call);
}

static int room_end(void *handle, const struct kvd_call *call)
{
	return kvd_room_close(handle, call);
}

static PyObject *room_close(PyObject *self, PyObject *args, PyObject *kwargs)
{
	return handle_close(self, args, kwargs, room_end, ((struct room *)self)->post);
}

/* ---- state
 * ------------------------------------------------------------------------------ */

static PyObject *room_state(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct handle *room = (struct handle *)self;
	int state;

	if (!handle_usable(room))
		return NULL;
	state = kvd_room_state(room->kvd);
	/* an opening without an answer ends when that is read */
	if (state == KVD_BOOTSTRAPPING && client_trylock(room->client)) {
		client_turn(room->client, false);
		client_unlock(room->client);
		if (!handle_usable(room)) /* a callback closed it */
			return NULL;
		state = kvd_room_state(room->kvd);
	}
	if (state < 0)
		return ext_raise_code(-state, "room %llu: its slot was reused",
				      (unsigned long long)room->number);
	return PyLong_FromLong(state);
}

/* (state, flags, error, retryable, bytes, total, first token or -1, done, rows, moved_us)
 */
static PyObject *room_read(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct handle *room = (struct handle *)self;
	struct kvd_room_status st;

	if (!handle_usable(room))
		return NULL;
	client_look(room->client);
	if (!handle_usable(room)) /* a callback closed it */
		return NULL;
	if (kvd_room_read(room->kvd, &st) < 0)
		return ext_raise_code(KVD_E_GONE, "room %llu: its slot was reused",
				      (unsigned long long)room->number);
	return Py_BuildValue("(iIiiKKLIII)", st.state, st.flags, st.error,
			     (int)st.retryable, (unsigned long long)st.bytes,
			     (unsigned long long)st.total, (long long)st.first_token,
			     (unsigned int)st.done, st.rows, st.moved_us);
}

/* ---- many ------------------------------------------------------------------------- */

#define STATE_CLOSED (-1) /* closed, or its slot was reused */
#define BATCH 64u	  /* rooms read together, with one check of the heartbeat */

/* A kvd._kvd.Room, or what a kvd.Room has as _room; a new reference. */
static PyObject *room_of(PyObject *list, Py_ssize_t i, PyObject *name)
{
	PyObject *outer = PyList_GetItem(list, i), *inner;

	if (!outer)
		return NULL;
	Py_INCREF(outer); /* the attribute's code may change the list */
	inner = Py_TYPE(outer) == room_type ? Py_NewRef(outer)
					    : PyObject_GetAttr(outer, name);
	Py_DECREF(outer);
	if (inner && Py_TYPE(inner) != room_type) {
		PyErr_SetString(PyExc_TypeError, "rooms: not a list of kvd.Room");
		Py_CLEAR(inner);
	}
	return inner;
}

/* The states of so many; returns how many have ended. Runs no Python code. */
static Py_ssize_t batch_read(PyObject **rooms, Py_ssize_t count, int *out)
{
	const struct kvd_room *at[BATCH] = {NULL};
	unsigned int of[BATCH], open = 0;
	int states[BATCH];
	Py_ssize_t ended;

	for (Py_ssize_t i = 0; i < count; i++) {
		const struct handle *room = (struct handle *)rooms[i];

		out[i] = STATE_CLOSED;
		if (!handle_is_open(room))
			continue;
		at[open] = room->kvd;
		of[open++] = (unsigned int)i;
	}
	ended = count - open + (Py_ssize_t)kvd_room_states(at, open, states);
	for (unsigned int i = 0; i < open; i++)
		out[of[i]] = states[i] < 0 ? STATE_CLOSED : states[i];
	return ended;
}

/* The same for a part of the list; negative with an exception. */
static Py_ssize_t batch_states(PyObject *list, PyObject *name, Py_ssize_t first,
			       Py_ssize_t count, int *out)
{
	PyObject *rooms[BATCH];
	Py_ssize_t n = 0, ended;

	while (n < count && (rooms[n] = room_of(list, first + n, name)))
		n++;
	ended = n < count ? -1 : batch_read(rooms, count, out);
	while (n > 0)
		Py_DECREF(rooms[--n]);
	return ended;
}

/* states(list of kvd.Room, address of as many int32) -> how many have ended. The caller
 * has checked the memory. */
static PyObject *room_states(PyObject *Py_UNUSED(module), PyObject *args)
{
	static PyObject *name; /* for ever */
	unsigned long long address;
	Py_ssize_t n, ended = 0, part;
	PyObject *list;
	int *out;

	if (!PyArg_ParseTuple(args, "OK", &list, &address))
		return NULL;
	n = PyList_Size(list);
	if (!name)
		name = PyUnicode_InternFromString("_room");
	if (n < 0 || !name)
		return NULL;
	out = (int *)(uintptr_t)address;
	for (Py_ssize_t first = 0; first < n; first += BATCH) {
		Py_ssize_t count = n - first < BATCH ? n - first : BATCH;

		part = batch_states(list, name, first, count, out + first);
		if (part < 0)
			return NULL;
		ended += part;
	}
	return PyLong_FromSsize_t(ended);
}

/* why(seconds): (number, code, retryable, scope, message), or None */
static PyObject *room_why(PyObject *self, PyObject *timeout)
{
	struct handle *room = (struct handle *)self;
	const struct kvd_error *why;
	struct kvd_error copy;
	int ms;

	if (!ext_timeout(timeout, &ms) || !handle_lock(room))
		return NULL;
	Py_BEGIN_ALLOW_THREADS why = kvd_room_why(room->kvd, ms);
	Py_END_ALLOW_THREADS if (why) copy = *why;
	client_unlock(room->client);
	return ext_error(why ? &copy : NULL);
}

/* landed(view or None, pages) -> bitmap */
static PyObject *room_landed(PyObject *self, PyObject *args)
{
	struct handle *room = (struct handle *)self;
	const char *view = NULL;
	Py_ssize_t pages;
	PyObject *bitmap;
	size_t bytes;
	void *at;
	int r;

	if (!PyArg_ParseTuple(args, "zn", &view, &pages) || !handle_usable(room))
		return NULL;
	bytes = ((size_t)pages + 7) / 8;
	at = mem_zalloc(bytes + 1);
	if (!at)
		return PyErr_NoMemory();
	if (!handle_lock(room)) {
		mem_free(at);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS r = kvd_room_landed(room->kvd, view, 0, at, bytes);
	Py_END_ALLOW_THREADS if (r < 0)
	{
		mem_free(at);
		return client_raise(room->client);
	}
	client_unlock(room->client);
	bitmap = PyBytes_FromStringAndSize(at, (Py_ssize_t)bytes);
	mem_free(at);
	return bitmap;
}

#define KEYWORDS(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS
static PyMethodDef methods[] = {
	{"bind", KEYWORDS(room_bind), NULL},
	{"send", KEYWORDS(room_send), NULL},
	{"extend", KEYWORDS(room_extend), NULL},
	{"abort", KEYWORDS(room_abort), NULL},
	{"close", KEYWORDS(room_close), NULL},
	{"state", room_state, METH_NOARGS, NULL},
	{"read", room_read, METH_NOARGS, NULL},
	{"why", room_why, METH_O, NULL},
	{"landed", room_landed, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyMemberDef members[] = {
	{"number", T_ULONGLONG, offsetof(struct handle, number), READONLY, NULL},
	{NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
	{Py_tp_new, room_make},
	{Py_tp_dealloc, room_dealloc},
	{Py_tp_methods, methods},
	{Py_tp_members, members},
	{0, NULL},
};

static PyMethodDef functions[] = {
	{"states", room_states, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_room_init(PyObject *module)
{
	room_type = ext_type(module, "kvd._kvd.Room", sizeof(struct room), slots);
	return room_type ? PyModule_AddFunctions(module, functions) : -1;
}
