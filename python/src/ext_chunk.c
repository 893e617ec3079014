/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks: spaces, holds, moves. Ids are bytes, 32 each; views, waits and names are passed
 * as those of rooms (ext_room.c).
 *
 * A handle that Python drops is closed in the background; a move's pages are kept alive
 * until it has ended, because the closing holds the reference.
 */
#include "python/src/ext.h"

#include "lib/kvd_attend.h"

static PyTypeObject *space_type, *hold_type, *move_type;

static int space_shut(void *handle, const struct kvd_call *call)
{
	return kvd_space_close(handle, call);
}

static int hold_shut(void *handle, const struct kvd_call *call)
{
	return kvd_hold_close(handle, call);
}

/* A move that was dropped while running is aborted first, and closed when quiesced. */
static int move_shut(void *handle, const struct kvd_call *call)
{
	int state = kvd_move_state(handle);
	struct kvd_call nobody = {.on_done = ext_on_nothing};

	if (state == KVD_FAILED || state == KVD_SUCCESS || state < 0)
		return kvd_move_close(handle, call);
	kvd_move_abort(handle, &nobody);
	return -KVD_E_STATE; /* retried in the next turn */
}

static handle_shut *shut_of(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	if (type == space_type)
		return space_shut;
	return type == hold_type ? hold_shut : move_shut;
}

static void chunk_dealloc(PyObject *self)
{
	handle_dealloc(self, shut_of(self));
}

/* ---- calls: each is started under the client's lock -------------------------------- */

enum chunk_call {
	CHUNK_OPEN_SPACE,
	CHUNK_PUT,
	CHUNK_PUBLISH,
	CHUNK_WITHDRAW,
	CHUNK_FETCH,
	CHUNK_ABORT,
};

struct chunk_start {
	enum chunk_call what;
	struct client *c;
	const struct handle *of; /* the space or hold, NULL: a space is opened */
	void *kvd;		 /* of that */
	struct kvd_space_args space;
	struct kvd_chunks chunks;
	struct kvd_move_args move;
	uint32_t grace_ms;
	int post;
	struct use pool, region; /* of the move, or of the space */
	void *made;
};

static int chunk_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;
	struct kvd_move **move_p = (struct kvd_move **)&s->made;

	switch (s->what) {
	case CHUNK_OPEN_SPACE:
		return kvd_space_open(s->c->kvd, &s->space, call,
				      (struct kvd_space **)&s->made);
	case CHUNK_PUT:
		return kvd_put(s->kvd, &s->chunks, &s->move, call, move_p);
	case CHUNK_PUBLISH:
		return kvd_publish(s->kvd, &s->chunks, &s->move, call, move_p);
	case CHUNK_WITHDRAW:
		return kvd_withdraw(s->kvd, &s->chunks, s->grace_ms, call, move_p);
	case CHUNK_FETCH:
		return kvd_fetch(s->kvd, &s->move, call, move_p);
	default:
		return kvd_move_abort(s->kvd, call);
	}
}

static int chunk_move_end(void *handle, const struct kvd_call *call)
{
	return kvd_move_close(handle, call);
}

static int chunk_run(struct chunk_start *s, int ms)
{
	const struct use uses[] = {{s->of, &s->kvd}, s->pool, s->region};
	const struct run run = {.client = s->c,
				.start = chunk_begin,
				.ctx = s,
				.uses = uses,
				.use_count = sizeof(uses) / sizeof(uses[0]),
				.timeout_ms = ms,
				.post = s->post};

	return client_run(&run, NULL);
}

/* A put or a fetch without an answer: the daemon may have started it, and only its handle
 * shows when its pages are idle. */
static bool in_doubt(const struct chunk_start *s, PyTypeObject *type)
{
	struct kvd_room_status st;

	return type == move_type && s->made && s->c->kvd &&
	       kvd_move_read(s->made, &st) == 0 && st.state == KVD_TRANSFERRING &&
	       st.flags & KVD_FLAG_ABORTING;
}

/* The object that the call returns. */
static PyObject *chunk_made(PyTypeObject *type, const char *noun, struct chunk_start *s,
			    PyObject *keep, int ms)
{
	struct handle *object = handle_new(type, s->c, noun, keep);
	int r;

	if (!object)
		return NULL;
	r = chunk_run(s, ms);
	if (r < 0 && in_doubt(s, type)) {
		PyErr_Clear();
		r = 0;
	}
	return handle_made(object, s->made, r);
}

static PyObject *chunk_close(PyObject *self, PyObject *args)
{
	return handle_close(self, args, NULL,
			    Py_TYPE(self) == move_type ? chunk_move_end : shut_of(self),
			    false);
}

/* ---- Space ----------------------------------------------------------------------------
 */

/* Space(client, pool or None, layout or None, model, revision, scheme, rope, tokens,
 * views or None, timeout) */
static PyObject *space_make(PyTypeObject *type, PyObject *args,
			    PyObject *Py_UNUSED(kwargs))
{
	struct chunk_start s = {.what = CHUNK_OPEN_SPACE};
	PyObject *client, *pool, *views, *made = NULL;
	const char **names = NULL;
	int ms;

	if (!PyArg_ParseTuple(args, "O!OzszszIOO&", client_type, &client, &pool,
			      &s.space.layout, &s.space.model, &s.space.revision,
			      &s.space.scheme, &s.space.rope, &s.space.tokens, &views,
			      ext_timeout, &ms))
		return NULL;
	s.c = (struct client *)client;
	if (pool != Py_None) {
		if (!pool_usable(pool, s.c))
			return NULL;
		s.pool = (struct use){(struct handle *)pool, &s.space.pool};
	}
	if (ext_names_parse(views, &names, &s.space.view_count) == 0) {
		s.space.views = views == Py_None ? NULL : names;
		made = chunk_made(type, "space", &s, NULL, ms);
	}
	mem_free(names);
	return made;
}

/* "O&" of PyArg_ParseTuple(): (ids, first). Returns 1, or 0 with an exception. */
static int chunks_parse(PyObject *tuple, void *chunks_p)
{
	struct kvd_chunks *chunks = chunks_p;
	unsigned long long first;
	const char *ids;
	Py_ssize_t bytes;

	if (!PyArg_ParseTuple(tuple, "y#K", &ids, &bytes, &first))
		return 0;
	if (bytes <= 0 || bytes % KVD_CHUNK_ID_BYTES) {
		PyErr_Format(PyExc_ValueError, "ids: %zd bytes are not a multiple of %d",
			     bytes, KVD_CHUNK_ID_BYTES);
		return 0;
	}
	*chunks = (struct kvd_chunks){
		.ids = ids, .count = (size_t)bytes / KVD_CHUNK_ID_BYTES, .first = first};
	return 1;
}

/* find((ids, first), timeout) -> (chunks, tokens) */
static PyObject *space_find(PyObject *self, PyObject *args)
{
	struct handle *space = (struct handle *)self;
	struct kvd_chunks chunks;
	struct kvd_found found;
	int ms, r;

	if (!PyArg_ParseTuple(args, "O&O&", chunks_parse, &chunks, ext_timeout, &ms) ||
	    !handle_lock(space))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_find(space->kvd, &chunks, ms, &found);
	Py_END_ALLOW_THREADS if (!client_end(space->client, r)) return NULL;
	return Py_BuildValue("(KK)", (unsigned long long)found.chunks,
			     (unsigned long long)found.tokens);
}

static PyObject *space_drop(PyObject *self, PyObject *args)
{
	struct handle *space = (struct handle *)self;
	struct kvd_chunks chunks;
	int ms, r;

	if (!PyArg_ParseTuple(args, "O&O&", chunks_parse, &chunks, ext_timeout, &ms) ||
	    !handle_lock(space))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_drop(space->kvd, &chunks, ms);
	Py_END_ALLOW_THREADS if (!client_end(space->client, r)) return NULL;
	Py_RETURN_NONE;
}

/* A hold of these chunks, or (NULL) of the secret's. libkvd waits for it itself: other
 * threads run meanwhile. */
static PyObject *hold_made(struct handle *space, const struct kvd_chunks *chunks,
			   const char *secret, uint32_t lease_ms, uint32_t remote_ms,
			   int ms)
{
	struct handle *hold;
	struct kvd_hold *kvd = NULL;
	int r;

	if (!handle_usable(space))
		return NULL;
	hold = handle_new(hold_type, space->client, "hold", NULL);
	if (!hold || !handle_lock(space)) {
		Py_XDECREF(hold);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS r =
		secret ? kvd_hold_join(space->kvd, secret, lease_ms, ms, &kvd)
		       : kvd_hold_open(space->kvd, chunks, lease_ms, remote_ms, ms, &kvd);
	Py_END_ALLOW_THREADS client_end(space->client, r);
	return handle_made(hold, kvd, r);
}

/* hold((ids, first), lease_ms, remote_ms, timeout) */
static PyObject *space_hold(PyObject *self, PyObject *args)
{
	unsigned int lease_ms, remote_ms;
	struct kvd_chunks chunks;
	int ms;

	if (!PyArg_ParseTuple(args, "O&IIO&", chunks_parse, &chunks, &lease_ms,
			      &remote_ms, ext_timeout, &ms))
		return NULL;
	return hold_made((struct handle *)self, &chunks, NULL, lease_ms, remote_ms, ms);
}

/* join(secret, lease_ms, timeout) */
static PyObject *space_join(PyObject *self, PyObject *args)
{
	unsigned int lease_ms;
	const char *secret;
	Py_ssize_t bytes;
	int ms;

	if (!PyArg_ParseTuple(args, "y#IO&", &secret, &bytes, &lease_ms, ext_timeout,
			      &ms))
		return NULL;
	if (bytes != KVD_HOLD_SECRET_BYTES) {
		PyErr_Format(PyExc_ValueError, "secret: %zd bytes, not %d", bytes,
			     KVD_HOLD_SECRET_BYTES);
		return NULL;
	}
	return hold_made((struct handle *)self, NULL, secret, lease_ms, 0, ms);
}

/* The pool, views and wait of a move; the caller frees the views in any case. */
static bool place_parse(struct chunk_start *s, PyObject *pool, PyObject *view_list,
			PyObject *wait, struct ext_views *views)
{
	if (!pool_usable(pool, s->c) || ext_views_parse(view_list, views) < 0 ||
	    ext_wait_parse(s->c, wait, &s->move.wait, &s->region) < 0)
		return false;
	s->pool = (struct use){(struct handle *)pool, &s->move.pool};
	s->move.views = views->at;
	s->move.view_count = views->count;
	return true;
}

/* put(pool, (ids, first), views, wait, timeout, post, durable, publish) */
static PyObject *space_put(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct handle *)self};
	PyObject *pool, *view_list, *wait, *made = NULL;
	struct ext_views views = {0};
	int ms, durable, publish;

	if (!PyArg_ParseTuple(args, "O!O&OOO&ppp", pool_type, &pool, chunks_parse,
			      &s.chunks, &view_list, &wait, ext_timeout, &ms, &s.post,
			      &durable, &publish) ||
	    !handle_usable(s.of))
		return NULL;
	s.what = publish ? CHUNK_PUBLISH : CHUNK_PUT;
	s.c = s.of->client;
	s.move.durable = durable;
	if (place_parse(&s, pool, view_list, wait, &views))
		made = chunk_made(move_type, "move", &s, pool, ms);
	ext_views_fini(&views);
	return made;
}

/* withdraw((ids, first), grace_ms, timeout) */
static PyObject *space_withdraw(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.what = CHUNK_WITHDRAW, .of = (struct handle *)self};
	int ms;

	if (!PyArg_ParseTuple(args, "O&IO&", chunks_parse, &s.chunks, &s.grace_ms,
			      ext_timeout, &ms) ||
	    !handle_usable(s.of))
		return NULL;
	s.c = s.of->client;
	return chunk_made(move_type, "move", &s, NULL, ms);
}

/* ---- Hold
 * ------------------------------------------------------------------------------ */

/* fetch(pool, views, wait, deadline_ms, timeout, post) */
static PyObject *hold_fetch(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.what = CHUNK_FETCH, .of = (struct handle *)self};
	PyObject *pool, *view_list, *wait, *made = NULL;
	struct ext_views views = {0};
	int ms;

	if (!PyArg_ParseTuple(args, "O!OOIO&p", pool_type, &pool, &view_list, &wait,
			      &s.move.deadline_ms, ext_timeout, &ms, &s.post) ||
	    !handle_usable(s.of))
		return NULL;
	s.c = s.of->client;
	if (place_parse(&s, pool, view_list, wait, &views))
		made = chunk_made(move_type, "move", &s, pool, ms);
	ext_views_fini(&views);
	return made;
}

const struct handle *ext_hold_of(PyObject *hold, const struct client *client)
{
	struct handle *object = (struct handle *)hold;

	if (Py_TYPE(hold) != hold_type || object->client != client) {
		PyErr_SetString(PyExc_ValueError, "hold: not a hold of this client");
		return NULL;
	}
	return handle_usable(object) ? object : NULL;
}

/* (chunks, tokens, first, remote, secret) */
static PyObject *hold_facts(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct handle *hold = (struct handle *)self;
	char secret[KVD_HOLD_SECRET_BYTES];
	struct kvd_found found;
	uint64_t first;

	if (!handle_usable(hold))
		return NULL;
	if (kvd_hold_found(hold->kvd, &found, &first) < 0 ||
	    kvd_hold_secret(hold->kvd, secret) < 0)
		return ext_raise_code(KVD_E_STATE, "hold: no answer so far");
	return Py_BuildValue("(KKKKy#)", (unsigned long long)found.chunks,
			     (unsigned long long)found.tokens, (unsigned long long)first,
			     (unsigned long long)found.remote, secret,
			     (Py_ssize_t)sizeof(secret));
}

/* ---- Move
 * ------------------------------------------------------------------------------ */

static PyObject *move_state(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct handle *move = (struct handle *)self;
	int state;

	if (!handle_usable(move))
		return NULL;
	state = kvd_move_state(move->kvd);
	return state < 0 ? ext_raise_code(-state, "move: its slot was reused")
			 : PyLong_FromLong(state);
}

/* (state, flags, error, retryable, bytes, total) */
static PyObject *move_read(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct handle *move = (struct handle *)self;
	struct kvd_room_status st;

	if (!handle_usable(move))
		return NULL;
	client_look(move->client);
	if (!handle_usable(move)) /* a callback closed it */
		return NULL;
	if (kvd_move_read(move->kvd, &st) < 0)
		return ext_raise_code(KVD_E_GONE, "move: its slot was reused");
	return Py_BuildValue("(iIiiKK)", st.state, st.flags, st.error, (int)st.retryable,
			     (unsigned long long)st.bytes, (unsigned long long)st.total);
}

/* show(timeout) -> (chunks, done, there, left_out, prefix_tokens, error or None) */
static PyObject *move_show(PyObject *self, PyObject *timeout)
{
	struct handle *move = (struct handle *)self;
	struct kvd_move_facts facts;
	PyObject *error;
	int ms, r;

	if (!ext_timeout(timeout, &ms) || !handle_lock(move))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_move_show(move->kvd, ms, &facts);
	Py_END_ALLOW_THREADS if (!client_end(move->client, r)) return NULL;
	error = ext_error(&facts.error);
	if (!error)
		return NULL;
	return Py_BuildValue("(KKKKKN)", (unsigned long long)facts.chunks,
			     (unsigned long long)facts.done,
			     (unsigned long long)facts.there,
			     (unsigned long long)facts.left_out,
			     (unsigned long long)facts.prefix_tokens, error);
}

static PyObject *move_abort(PyObject *self, PyObject *timeout)
{
	struct chunk_start s = {.what = CHUNK_ABORT, .of = (struct handle *)self};
	int ms;

	if (!ext_timeout(timeout, &ms) || !handle_usable(s.of))
		return NULL;
	s.c = s.of->client;
	if (chunk_run(&s, ms) < 0)
		return NULL;
	Py_RETURN_NONE;
}

/* ---- the types
 * --------------------------------------------------------------------------- */

static PyMethodDef space_methods[] = {
	{"find", space_find, METH_VARARGS, NULL},
	{"drop", space_drop, METH_VARARGS, NULL},
	{"hold", space_hold, METH_VARARGS, NULL},
	{"join", space_join, METH_VARARGS, NULL},
	{"put", space_put, METH_VARARGS, NULL},
	{"withdraw", space_withdraw, METH_VARARGS, NULL},
	{"close", chunk_close, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};
/* ((instance, first, chunks, tokens, gpu), …) */
static PyObject *hold_holders(PyObject *self, PyObject *timeout)
{
	struct handle *hold = (struct handle *)self;
	struct kvd_holder holders[KVD_HOLDERS_MAX];
	PyObject *list;
	int ms, count;

	if (!ext_timeout(timeout, &ms) || !handle_lock(hold))
		return NULL;
	Py_BEGIN_ALLOW_THREADS count = kvd_hold_holders(hold->kvd, holders, ms);
	Py_END_ALLOW_THREADS if (!client_end(hold->client, count)) return NULL;
	list = PyTuple_New(count);
	for (int i = 0; list && i < count; i++) {
		PyObject *one = Py_BuildValue("(y#KKKO)", holders[i].instance,
					      (Py_ssize_t)sizeof(holders[i].instance),
					      (unsigned long long)holders[i].first,
					      (unsigned long long)holders[i].chunks,
					      (unsigned long long)holders[i].tokens,
					      holders[i].gpu ? Py_True : Py_False);

		if (!one || PyTuple_SetItem(list, i, one) < 0)
			Py_CLEAR(list);
	}
	return list;
}

static PyMethodDef hold_methods[] = {
	{"fetch", hold_fetch, METH_VARARGS, NULL},
	{"facts", hold_facts, METH_NOARGS, NULL},
	{"holders", hold_holders, METH_O, NULL},
	{"close", chunk_close, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};
/* splice(pool, views, key, type, rope, delta) */
static PyObject *move_splice(PyObject *self, PyObject *args)
{
	struct handle *move = (struct handle *)self;
	PyObject *pool, *view_list, *rope, *done = NULL;
	struct ext_views views = {0};
	struct kvd_splice s = {0};
	int type, r;

	if (!PyArg_ParseTuple(args, "O!OsiOi", pool_type, &pool, &view_list, &s.key,
			      &type, &rope, &s.delta) ||
	    !ext_rope_parse(rope, &s.rope) || !pool_usable(pool, move->client))
		return NULL;
	s.type = (enum kvd_value_type)type;
	if (ext_views_parse(view_list, &views) == 0 && handle_lock(move)) {
		s.views = views.at;
		s.view_count = views.count;
		s.pool = ((struct handle *)pool)->kvd;
		Py_BEGIN_ALLOW_THREADS r = kvd_move_splice(move->kvd, &s);
		Py_END_ALLOW_THREADS if (client_end(move->client, r)) done =
			Py_NewRef(Py_None);
	}
	ext_views_fini(&views);
	return done;
}

static PyMethodDef move_methods[] = {
	{"state", move_state, METH_NOARGS, NULL},
	{"read", move_read, METH_NOARGS, NULL},
	{"show", move_show, METH_O, NULL},
	{"splice", move_splice, METH_VARARGS, NULL},
	{"abort", move_abort, METH_O, NULL},
	{"close", chunk_close, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyType_Slot space_slots[] = {
	{Py_tp_new, space_make},
	{Py_tp_dealloc, chunk_dealloc},
	{Py_tp_methods, space_methods},
	{0, NULL},
};
static PyType_Slot hold_slots[] = {
	{Py_tp_dealloc, chunk_dealloc},
	{Py_tp_methods, hold_methods},
	{0, NULL},
};
static PyType_Slot move_slots[] = {
	{Py_tp_dealloc, chunk_dealloc},
	{Py_tp_methods, move_methods},
	{0, NULL},
};

int ext_chunk_init(PyObject *module)
{
	space_type =
		ext_type(module, "kvd._kvd.Space", sizeof(struct handle), space_slots);
	hold_type = ext_type(module, "kvd._kvd.Hold", sizeof(struct handle), hold_slots);
	move_type = ext_type(module, "kvd._kvd.Move", sizeof(struct handle), move_slots);
	return space_type && hold_type && move_type ? 0 : -1;
}
