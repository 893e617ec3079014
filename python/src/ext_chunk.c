/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks: spaces, holds, moves. Ids come as bytes, 32 each; views, waits and names as
 * rooms' do (ext_room.c).
 *
 * A handle that Python drops is closed behind it; a move's pages stay until it has ended,
 * for its keep is let go of by what closes it.
 */
#include "python/src/ext.h"

#include <string.h>

static PyTypeObject *space_type, *hold_type, *move_type;

/* What all three are. */
struct chunk_object {
	PyObject_HEAD struct client *client;
	void *kvd;	/* NULL: closed */
	PyObject *keep; /* a move: its pool */
};

static bool chunk_usable(const struct chunk_object *object, const char *what)
{
	if (object->kvd && object->client->kvd)
		return true;
	ext_raise_code(KVD_E_STATE, "%s: closed", what);
	return false;
}

static struct chunk_object *chunk_new(PyTypeObject *type, struct client *c, void *kvd,
				      PyObject *keep)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct chunk_object *object = (struct chunk_object *)alloc(type, 0);

	if (!object)
		return NULL;
	Py_INCREF(c);
	object->client = c;
	object->kvd = kvd;
	Py_XINCREF(keep);
	object->keep = keep;
	return object;
}

static int space_shut(void *handle, const struct kvd_call *call)
{
	return kvd_space_close(handle, call);
}

static int hold_shut(void *handle, const struct kvd_call *call)
{
	return kvd_hold_close(handle, call);
}

/* What was dropped while it ran is aborted first; it is closed when it has quiesced. */
static int move_shut(void *handle, const struct kvd_call *call)
{
	int state = kvd_move_state(handle);
	struct kvd_call nobody = {.on_done = ext_on_nothing};

	if (state == KVD_FAILED || state == KVD_SUCCESS || state < 0)
		return kvd_move_close(handle, call);
	kvd_move_abort(handle, &nobody);
	return -KVD_E_STATE; /* looked at again in the next turn */
}

static void chunk_dealloc(PyObject *self)
{
	struct chunk_object *object = (struct chunk_object *)self;
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
	int (*shut)(void *, const struct kvd_call *) = type == space_type  ? space_shut
						       : type == hold_type ? hold_shut
									   : move_shut;

	if (object->kvd && object->client->kvd)
		client_close_later(object->client, shut, object->kvd, object->keep);
	else
		Py_XDECREF(object->keep);
	Py_XDECREF(object->client);
	release(self);
	Py_DECREF(type);
}

/* ---- calls: each is begun under the client's lock ---------------------------------- */

struct chunk_start {
	struct client *c;
	struct chunk_object *of;
	struct kvd_space_args space;
	struct kvd_chunks chunks;
	struct kvd_move_args move;
	uint32_t lease_ms, far_ms, grace_ms;
	const char *secret;
	int post;
	void *made;
};

static int space_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_space_open(s->c->kvd, &s->space, call, (struct kvd_space **)&s->made);
}

static int hold_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_hold_open(s->of->kvd, &s->chunks, s->lease_ms, s->far_ms, call,
			     (struct kvd_hold **)&s->made);
}

static int join_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_hold_join(s->of->kvd, s->secret, s->lease_ms, call,
			     (struct kvd_hold **)&s->made);
}

static int put_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_put(s->of->kvd, &s->chunks, &s->move, call,
		       (struct kvd_move **)&s->made);
}

static int publish_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_publish(s->of->kvd, &s->chunks, &s->move, call,
			   (struct kvd_move **)&s->made);
}

static int withdraw_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_withdraw(s->of->kvd, &s->chunks, s->grace_ms, call,
			    (struct kvd_move **)&s->made);
}

static int fetch_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;

	return kvd_fetch(s->of->kvd, &s->move, call, (struct kvd_move **)&s->made);
}

static int shut_begin(void *ctx, const struct kvd_call *call)
{
	struct chunk_start *s = ctx;
	PyTypeObject *type = Py_TYPE(s->of);

	if (type == space_type)
		return kvd_space_close(s->of->kvd, call);
	return type == hold_type ? kvd_hold_close(s->of->kvd, call)
				 : kvd_move_close(s->of->kvd, call);
}

static int abort_begin(void *ctx, const struct kvd_call *call)
{
	return kvd_move_abort(((struct chunk_start *)ctx)->of->kvd, call);
}

/* Of what is posted nothing is waited for: the GIL stays here. */
static int chunk_run(struct chunk_start *s, op_start *begin, int ms)
{
	static const struct kvd_call posted = {.post = true};

	if (!s->post)
		return client_run(s->c, begin, s, ms, NULL, NULL);
	if (!client_lock(s->c))
		return -1;
	if (begin(s, &posted) < 0) {
		client_raise(s->c, kvd_last_error(s->c->kvd));
		return -1;
	}
	client_unlock(s->c);
	return 0;
}

/* One that waits inside libkvd: others may run meanwhile. */
static int chunk_block(struct chunk_start *s, op_start *begin, int ms)
{
	const struct kvd_call call = {.timeout_ms = ms};
	int r;

	if (!client_lock(s->c))
		return -1;
	Py_BEGIN_ALLOW_THREADS r = begin(s, &call);
	Py_END_ALLOW_THREADS if (r < 0)
	{
		client_raise(s->c, kvd_last_error(s->c->kvd));
		return -1;
	}
	client_unlock(s->c);
	return 0;
}

/* A put or a fetch without an answer: the daemon may have begun it, and only its handle
 * says when its pages are still. */
static bool in_doubt(const struct chunk_start *s, PyTypeObject *type)
{
	struct kvd_room_status st;

	return type == move_type && s->made && s->c->kvd &&
	       kvd_move_read(s->made, &st) == 0 && st.state == KVD_TRANSFERRING &&
	       st.flags & KVD_FLAG_ABORTING;
}

/* The object that the call makes; what it made without one being had is closed. */
static PyObject *chunk_made(PyTypeObject *type, struct chunk_start *s, op_start *begin,
			    int (*shut)(void *, const struct kvd_call *), PyObject *keep,
			    int ms)
{
	struct chunk_object *object = chunk_new(type, s->c, NULL, keep);

	if (!object)
		return NULL;
	if ((type == hold_type ? chunk_block(s, begin, ms) : chunk_run(s, begin, ms)) <
	    0) {
		if (!in_doubt(s, type)) {
			if (s->made && s->c->kvd) {
				Py_XINCREF(keep);
				client_close_later(s->c, shut, s->made, keep);
			}
			Py_DECREF(object);
			return NULL;
		}
		PyErr_Clear();
	}
	object->kvd = s->made;
	return (PyObject *)object;
}

static PyObject *chunk_close(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct chunk_object *)self};
	PyObject *timeout = NULL;
	int ms;

	if (!PyArg_ParseTuple(args, "|O", &timeout) || ext_timeout(timeout, &ms) < 0)
		return NULL;
	if (!s.of->kvd || !s.of->client->kvd)
		Py_RETURN_NONE;
	if (client_run(s.of->client, shut_begin, &s, ms, NULL, NULL) < 0)
		return NULL;
	s.of->kvd = NULL;
	Py_CLEAR(s.of->keep);
	Py_RETURN_NONE;
}

/* ---- Space ----------------------------------------------------------------------------
 */

/* Space(client, pool or None, layout or None, model, revision, scheme, rope, tokens,
 * views or None, timeout) */
static PyObject *space_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct chunk_start s = {0};
	PyObject *client, *pool, *views, *timeout, *made = NULL;
	const char **names = NULL;
	int ms;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!OzszszIOO", client_type, &client, &pool,
			      &s.space.layout, &s.space.model, &s.space.revision,
			      &s.space.scheme, &s.space.rope, &s.space.tokens, &views,
			      &timeout) ||
	    ext_timeout(timeout, &ms) < 0)
		return NULL;
	s.c = (struct client *)client;
	if (pool != Py_None) {
		if (Py_TYPE(pool) != pool_type || ((struct pool *)pool)->client != s.c) {
			PyErr_SetString(PyExc_ValueError,
					"pool: it is no pool of this client");
			return NULL;
		}
		s.space.pool = ((struct pool *)pool)->kvd;
		if (!s.space.pool) {
			PyErr_SetString(PyExc_ValueError,
					"pool: it is not registered any more");
			return NULL;
		}
	}
	if (ext_names_parse(views, &names, &s.space.view_count) == 0) {
		s.space.views = views == Py_None ? NULL : names;
		made = chunk_made(type, &s, space_begin, space_shut, NULL, ms);
	}
	mem_free(names);
	return made;
}

static bool ids_parse(const char *ids, Py_ssize_t bytes, unsigned long long first,
		      struct kvd_chunks *chunks)
{
	if (bytes <= 0 || bytes % KVD_CHUNK_ID_BYTES) {
		PyErr_Format(PyExc_ValueError, "ids: %zd bytes are no ids of %d", bytes,
			     KVD_CHUNK_ID_BYTES);
		return false;
	}
	*chunks = (struct kvd_chunks){
		.ids = ids, .count = (size_t)bytes / KVD_CHUNK_ID_BYTES, .first = first};
	return true;
}

/* find(ids, first, timeout) -> (chunks, tokens) */
static PyObject *space_find(PyObject *self, PyObject *args)
{
	struct chunk_object *space = (struct chunk_object *)self;
	struct kvd_chunks chunks;
	struct kvd_found found;
	unsigned long long first;
	PyObject *timeout;
	const char *ids;
	Py_ssize_t bytes;
	int ms, r;

	if (!PyArg_ParseTuple(args, "y#KO", &ids, &bytes, &first, &timeout) ||
	    ext_timeout(timeout, &ms) < 0 || !ids_parse(ids, bytes, first, &chunks) ||
	    !chunk_usable(space, "space") || !client_lock(space->client))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_find(space->kvd, &chunks, ms, &found);
	Py_END_ALLOW_THREADS if (r < 0) return client_raise(
		space->client, kvd_last_error(space->client->kvd));
	client_unlock(space->client);
	return Py_BuildValue("(KK)", (unsigned long long)found.chunks,
			     (unsigned long long)found.tokens);
}

static PyObject *space_drop(PyObject *self, PyObject *args)
{
	struct chunk_object *space = (struct chunk_object *)self;
	struct kvd_chunks chunks;
	unsigned long long first;
	PyObject *timeout;
	const char *ids;
	Py_ssize_t bytes;
	int ms, r;

	if (!PyArg_ParseTuple(args, "y#KO", &ids, &bytes, &first, &timeout) ||
	    ext_timeout(timeout, &ms) < 0 || !ids_parse(ids, bytes, first, &chunks) ||
	    !chunk_usable(space, "space") || !client_lock(space->client))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_drop(space->kvd, &chunks, ms);
	Py_END_ALLOW_THREADS if (r < 0) return client_raise(
		space->client, kvd_last_error(space->client->kvd));
	client_unlock(space->client);
	Py_RETURN_NONE;
}

/* hold(ids, first, lease_ms, far_ms, timeout) */
static PyObject *space_hold(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct chunk_object *)self};
	unsigned long long first;
	PyObject *timeout;
	const char *ids;
	Py_ssize_t bytes;
	int ms;

	if (!PyArg_ParseTuple(args, "y#KIIO", &ids, &bytes, &first, &s.lease_ms,
			      &s.far_ms, &timeout) ||
	    ext_timeout(timeout, &ms) < 0 || !ids_parse(ids, bytes, first, &s.chunks) ||
	    !chunk_usable(s.of, "space"))
		return NULL;
	s.c = s.of->client;
	return chunk_made(hold_type, &s, hold_begin, hold_shut, NULL, ms);
}

/* join(secret, lease_ms, timeout) */
static PyObject *space_join(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct chunk_object *)self};
	PyObject *timeout;
	Py_ssize_t bytes;
	int ms;

	if (!PyArg_ParseTuple(args, "y#IO", &s.secret, &bytes, &s.lease_ms, &timeout) ||
	    ext_timeout(timeout, &ms) < 0 || !chunk_usable(s.of, "space"))
		return NULL;
	if (bytes != KVD_HOLD_SECRET_BYTES) {
		PyErr_Format(PyExc_ValueError, "secret: %zd bytes, not %d", bytes,
			     KVD_HOLD_SECRET_BYTES);
		return NULL;
	}
	s.c = s.of->client;
	return chunk_made(hold_type, &s, join_begin, hold_shut, NULL, ms);
}

/* The pool, views and wait of a move; the views are to be freed in any case. */
static bool place_parse(struct chunk_start *s, PyObject *pool, PyObject *view_list,
			PyObject *wait, struct ext_views *views)
{
	if (((struct pool *)pool)->client != s->c || !((struct pool *)pool)->kvd) {
		PyErr_SetString(PyExc_ValueError,
				"pool: it is no registered pool of this client");
		return false;
	}
	s->move.pool = ((struct pool *)pool)->kvd;
	if (ext_views_parse(view_list, views) < 0 ||
	    ext_wait_parse(s->c, wait, &s->move.wait) < 0)
		return false;
	s->move.views = views->at;
	s->move.view_count = views->count;
	return true;
}

/* put(pool, ids, first, views, wait, timeout, post, durable, publish) */
static PyObject *space_put(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct chunk_object *)self};
	PyObject *pool, *view_list, *wait, *timeout, *made = NULL;
	struct ext_views views = {0};
	unsigned long long first;
	const char *ids;
	Py_ssize_t bytes;
	int ms, durable, publish;

	if (!PyArg_ParseTuple(args, "O!y#KOOOppp", pool_type, &pool, &ids, &bytes, &first,
			      &view_list, &wait, &timeout, &s.post, &durable, &publish) ||
	    ext_timeout(timeout, &ms) < 0 || !ids_parse(ids, bytes, first, &s.chunks) ||
	    !chunk_usable(s.of, "space"))
		return NULL;
	s.c = s.of->client;
	s.move.durable = durable;
	if (place_parse(&s, pool, view_list, wait, &views))
		made = chunk_made(move_type, &s, publish ? publish_begin : put_begin,
				  move_shut, pool, ms);
	ext_views_fini(&views);
	return made;
}

/* withdraw(ids, first, grace_ms, timeout) */
static PyObject *space_withdraw(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct chunk_object *)self};
	unsigned long long first;
	PyObject *timeout;
	const char *ids;
	Py_ssize_t bytes;
	int ms;

	if (!PyArg_ParseTuple(args, "y#KIO", &ids, &bytes, &first, &s.grace_ms,
			      &timeout) ||
	    ext_timeout(timeout, &ms) < 0 || !ids_parse(ids, bytes, first, &s.chunks) ||
	    !chunk_usable(s.of, "space"))
		return NULL;
	s.c = s.of->client;
	return chunk_made(move_type, &s, withdraw_begin, move_shut, NULL, ms);
}

/* ---- Hold
 * ------------------------------------------------------------------------------ */

/* fetch(pool, views, wait, deadline_ms, timeout, post) */
static PyObject *hold_fetch(PyObject *self, PyObject *args)
{
	struct chunk_start s = {.of = (struct chunk_object *)self};
	PyObject *pool, *view_list, *wait, *timeout, *made = NULL;
	struct ext_views views = {0};
	int ms;

	if (!PyArg_ParseTuple(args, "O!OOIOp", pool_type, &pool, &view_list, &wait,
			      &s.move.deadline_ms, &timeout, &s.post) ||
	    ext_timeout(timeout, &ms) < 0 || !chunk_usable(s.of, "hold"))
		return NULL;
	s.c = s.of->client;
	if (place_parse(&s, pool, view_list, wait, &views))
		made = chunk_made(move_type, &s, fetch_begin, move_shut, pool, ms);
	ext_views_fini(&views);
	return made;
}

struct kvd_hold *ext_hold_of(PyObject *hold, const struct client *client)
{
	struct chunk_object *object = (struct chunk_object *)hold;

	if (Py_TYPE(hold) != hold_type || object->client != client) {
		PyErr_SetString(PyExc_ValueError, "hold: it is no hold of this client");
		return NULL;
	}
	return chunk_usable(object, "hold") ? object->kvd : NULL;
}

/* (chunks, tokens, first, far, secret) */
static PyObject *hold_facts(PyObject *self, PyObject *none)
{
	struct chunk_object *hold = (struct chunk_object *)self;
	char secret[KVD_HOLD_SECRET_BYTES];
	struct kvd_found found;
	uint64_t first;

	(void)none;
	if (!chunk_usable(hold, "hold"))
		return NULL;
	if (kvd_hold_found(hold->kvd, &found, &first) < 0 ||
	    kvd_hold_secret(hold->kvd, secret) < 0)
		return ext_raise_code(KVD_E_STATE, "hold: not answered yet");
	return Py_BuildValue("(KKKKy#)", (unsigned long long)found.chunks,
			     (unsigned long long)found.tokens, (unsigned long long)first,
			     (unsigned long long)found.far, secret,
			     (Py_ssize_t)sizeof(secret));
}

/* ---- Move
 * ------------------------------------------------------------------------------ */

static PyObject *move_state(PyObject *self, PyObject *none)
{
	struct chunk_object *move = (struct chunk_object *)self;
	int state;

	(void)none;
	if (!chunk_usable(move, "move"))
		return NULL;
	state = kvd_move_state(move->kvd);
	return state < 0 ? ext_raise_code(-state, "move: its slot is another's")
			 : PyLong_FromLong(state);
}

/* (state, flags, error, retryable, bytes, total) */
static PyObject *move_read(PyObject *self, PyObject *none)
{
	struct chunk_object *move = (struct chunk_object *)self;
	struct kvd_room_status st;

	(void)none;
	if (!chunk_usable(move, "move"))
		return NULL;
	client_look(move->client);
	if (kvd_move_read(move->kvd, &st) < 0)
		return ext_raise_code(KVD_E_GONE, "move: its slot is another's");
	return Py_BuildValue("(iIiiKK)", st.state, st.flags, st.error, (int)st.retryable,
			     (unsigned long long)st.bytes, (unsigned long long)st.total);
}

/* show(timeout) -> (chunks, done, there, left_out, prefix_tokens, error or None) */
static PyObject *move_show(PyObject *self, PyObject *timeout)
{
	struct chunk_object *move = (struct chunk_object *)self;
	struct kvd_move_facts facts;
	PyObject *error, *message;
	int ms, r;

	if (ext_timeout(timeout, &ms) < 0 || !chunk_usable(move, "move") ||
	    !client_lock(move->client))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_move_show(move->kvd, ms, &facts);
	Py_END_ALLOW_THREADS if (r < 0) return client_raise(
		move->client, kvd_last_error(move->client->kvd));
	client_unlock(move->client);
	if (!facts.error.code) {
		Py_INCREF(Py_None);
		error = Py_None;
	} else {
		message = PyUnicode_DecodeUTF8(facts.error.message,
					       (Py_ssize_t)strlen(facts.error.message),
					       "replace");
		error = message ? Py_BuildValue("(isisN)", facts.error.code,
						kvd_code_name(facts.error.code),
						(int)facts.error.retryable,
						facts.error.scope, message)
				: NULL;
	}
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
	struct chunk_start s = {.of = (struct chunk_object *)self};
	int ms;

	if (ext_timeout(timeout, &ms) < 0 || !chunk_usable(s.of, "move"))
		return NULL;
	if (client_run(s.of->client, abort_begin, &s, ms, NULL, NULL) < 0)
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
/* ((instance, chunks, tokens), …) */
static PyObject *hold_holders(PyObject *self, PyObject *timeout)
{
	struct chunk_object *hold = (struct chunk_object *)self;
	struct kvd_holder holders[KVD_HOLDERS_MAX];
	PyObject *list;
	int ms, count;

	if (ext_timeout(timeout, &ms) < 0 || !chunk_usable(hold, "hold") ||
	    !client_lock(hold->client))
		return NULL;
	Py_BEGIN_ALLOW_THREADS count = kvd_hold_holders(hold->kvd, holders, ms);
	Py_END_ALLOW_THREADS if (count < 0) return client_raise(
		hold->client, kvd_last_error(hold->client->kvd));
	client_unlock(hold->client);
	list = PyTuple_New(count);
	for (int i = 0; list && i < count; i++) {
		PyObject *one = Py_BuildValue("(y#KK)", holders[i].instance,
					      (Py_ssize_t)sizeof(holders[i].instance),
					      (unsigned long long)holders[i].chunks,
					      (unsigned long long)holders[i].tokens);

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
static PyMethodDef move_methods[] = {
	{"state", move_state, METH_NOARGS, NULL},
	{"read", move_read, METH_NOARGS, NULL},
	{"show", move_show, METH_O, NULL},
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
static PyType_Spec space_spec = {
	.name = "kvd._kvd.Space",
	.basicsize = sizeof(struct chunk_object),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = space_slots,
};
static PyType_Spec hold_spec = {
	.name = "kvd._kvd.Hold",
	.basicsize = sizeof(struct chunk_object),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = hold_slots,
};
static PyType_Spec move_spec = {
	.name = "kvd._kvd.Move",
	.basicsize = sizeof(struct chunk_object),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = move_slots,
};

int ext_chunk_init(PyObject *module)
{
	space_type = (PyTypeObject *)ext_type(module, "Space", &space_spec);
	hold_type = (PyTypeObject *)ext_type(module, "Hold", &hold_spec);
	move_type = (PyTypeObject *)ext_type(module, "Move", &move_spec);
	return space_type && hold_type && move_type ? 0 : -1;
}
