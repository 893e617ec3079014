/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One-sided transfers, the base of the nixl package.
 *
 * No call waits. A list is checked in this process when it is made, and sent to the
 * daemon through the ring: a list of a remote session once the session is attached,
 * which may be much later. A transfer that is posted before its lists are ready is sent
 * by the next call that reads it. A refusal of the daemon is reported as the transfer's
 * failure.
 *
 * Reading the state of a transfer is a read of the status page. An error that was
 * reported once is kept until the next post, whatever the page shows later: its caller
 * will not check for a success.
 */
#include "daemon/base/clock.h"
#include "python/src/ext.h"

#include <string.h>

#define ROWS_WITH_POST 256u
#define WHY_MS 200
#define FIRST_NS UINT64_C(500000000)
#define AGAIN_NS UINT64_C(1000000000) /* to restore objects lost with a daemon */

static PyTypeObject *xfer_type;

/* ---- transfers ------------------------------------------------------------------------
 */

struct xfer {
	PyObject_HEAD struct client *client;
	struct dlist *local, *remote;
	enum kvd_op op;
	uint32_t *local_index, *remote_index; /* NULL: all rows */
	size_t count;
	uint64_t bytes;
	PyObject *notif; /* bytes or NULL */
	bool notif_new;	 /* not sent to the daemon yet */
	struct kvd_xfer *kvd;
	unsigned int serial;	/* of its remote list when it was made */
	bool posted;		/* ever */
	bool wanted;		/* posted, and not sent to the daemon yet */
	struct kvd_error error; /* reported once: it is kept */
	uint64_t post_ns, begin_ns, end_ns;
	size_t pieces; /* 0: not counted yet */
};

static int xfer_shut(void *handle, const struct kvd_call *call)
{
	int r = kvd_xfer_release(handle);

	(void)call;
	return r < 0 ? r : 1;
}

static int xfer_tell(struct xfer *x)
{
	struct kvd_xfer_args a = {.op = x->op,
				  .local = x->local->kvd,
				  .remote = x->remote->kvd,
				  .local_index = x->local_index,
				  .remote_index = x->remote_index,
				  .local_index_count = x->local_index ? x->count : 0,
				  .remote_index_count = x->remote_index ? x->count : 0};

	if (x->notif) {
		a.notif = PyBytes_AsString(x->notif);
		a.notif_bytes = (size_t)PyBytes_Size(x->notif);
	}
	x->notif_new = false;
	x->serial = x->remote->serial;
	return kvd_xfer_make(x->client->kvd, &a, &x->kvd);
}

static int xfer_post_now(struct xfer *x)
{
	bool tell = x->notif && x->notif_new;

	return kvd_xfer_post(x->kvd, tell ? PyBytes_AsString(x->notif) : NULL,
			     tell ? (size_t)PyBytes_Size(x->notif) : 0);
}

/* Objects that were lost with the own daemon are restored in the background, and a
 * session that does not return is tried forever: a post waits for it only this long. */
static bool xfer_late(const struct xfer *x)
{
	return clock_ns() - x->begin_ns >= AGAIN_NS;
}

/* A post that could not be sent now: whether it is retried. */
static bool xfer_waits(const struct xfer *x, int r)
{
	return r == -KVD_E_FULL || r == -KVD_E_LOST ||
	       (r == -KVD_E_BUSY && !xfer_late(x));
}

/* A transfer without bytes is done when its notification is sent. */
static void xfer_go_empty(struct xfer *x)
{
	int r = 0;

	if (!x->wanted)
		return;
	if (x->notif)
		r = kvd_notif_send(x->client->kvd, x->remote->attach->number,
				   PyBytes_AsString(x->notif),
				   (size_t)PyBytes_Size(x->notif));
	if (xfer_waits(x, r))
		return;
	if (r < 0)
		x->error = *kvd_last_error(x->client->kvd);
	else
		x->end_ns = clock_ns();
	x->wanted = false;
}

/* Create it at the daemon if both lists are ready, and post it if that is wanted. With
 * the lock and the GIL. */
static void xfer_go(struct xfer *x)
{
	int local = dlist_go(x->local), remote = dlist_go(x->remote), r = 0;

	if (local == REFUSED || remote == REFUSED) {
		if (x->wanted)
			x->error = local == REFUSED ? x->local->error : x->remote->error;
		x->wanted = false;
		return;
	}
	if (x->wanted && (x->local->busy || x->remote->busy) && xfer_late(x)) {
		x->error = (struct kvd_error){
			.code = KVD_E_PEER,
			.scope = "peer",
			.retryable = true,
			.message = "its session was lost with a daemon, not restored"};
		x->wanted = false;
	}
	if (local != READY || remote != READY)
		return;
	if (x->count == 0) {
		xfer_go_empty(x);
		return;
	}
	if (x->kvd && x->serial != x->remote->serial) {
		kvd_xfer_release(x->kvd);
		x->kvd = NULL;
	}
	if (!x->kvd)
		r = xfer_tell(x);
	if (r == 0 && x->wanted)
		r = xfer_post_now(x);
	if (r == -KVD_E_STATE && x->posted && x->kvd) { /* of a session that has ended */
		kvd_xfer_release(x->kvd);
		x->kvd = NULL;
		r = xfer_tell(x);
		if (r == 0 && x->wanted)
			r = xfer_post_now(x);
	}
	if (xfer_waits(x, r))
		return;
	if (r < 0 && x->wanted)
		x->error = *kvd_last_error(x->client->kvd);
	if (r == 0)
		x->notif_new = false;
	x->wanted = false;
}

/* The state in the status page; without a post that was not sent yet. */
static void xfer_look(struct xfer *x, struct kvd_room_status *st)
{
	*st = (struct kvd_room_status){.state = KVD_BOOTSTRAPPING};
	if (x->wanted && client_trylock(x->client)) {
		client_turn(x->client, true);
		xfer_go(x);
		client_unlock(x->client);
	}
	if (x->wanted && x->client->kvd)
		return;
	if (!x->client->kvd || !x->kvd || kvd_xfer_read(x->kvd, st) < 0)
		*st = (struct kvd_room_status){.state = KVD_FAILED, .error = KVD_E_GONE};
}

enum { POLL_DONE = 0, POLL_PROC = 1, POLL_NOT_POSTED = 2 };

/* One of these, or negative: -code, which is kept. */
static int xfer_poll(struct xfer *x)
{
	struct kvd_room_status st;

	if (!x->posted)
		return POLL_NOT_POSTED;
	if (x->error.code)
		return -x->error.code;
	if (x->end_ns)
		return POLL_DONE;
	xfer_look(x, &st);
	if (x->error.code)
		return -x->error.code;
	if (x->end_ns)
		return POLL_DONE;
	if (st.state == KVD_SUCCESS) {
		x->end_ns = st.changed_ns > x->begin_ns ? st.changed_ns : clock_ns();
		return POLL_DONE;
	}
	if (st.state != KVD_FAILED && !(st.flags & KVD_FLAG_ABORTING))
		return POLL_PROC;
	x->error = (struct kvd_error){.code = st.error ? st.error : KVD_E_LOST,
				      .retryable = st.retryable};
	return -x->error.code;
}

/* Whether none of its bytes can move any more. */
static bool xfer_quiesced(struct xfer *x)
{
	int state;

	if (!x->posted || !x->kvd)
		return true;
	/* for an unsent post the previous run counts */
	state = kvd_xfer_state(x->kvd);
	return state <= KVD_FAILED || state == KVD_SUCCESS;
}

/* ---- creation: index lists in the engines' forms --------------------------------------
 */

static int index_from_list(PyObject *list, uint32_t *out, size_t count, uint64_t limit)
{
	bool tuple = PyTuple_Check(list);

	for (size_t i = 0; i < count; i++) {
		PyObject *item = tuple ? PyTuple_GetItem(list, (Py_ssize_t)i)
				       : PyList_GetItem(list, (Py_ssize_t)i);
		long long v = item ? PyLong_AsLongLong(item) : -1;

		if (v == -1 && PyErr_Occurred()) {
			if (!PyErr_ExceptionMatches(PyExc_OverflowError))
				return -1;
			PyErr_Clear();
		}
		if (v < 0 || (uint64_t)v >= limit || v > UINT32_MAX) {
			ext_raise_code(KVD_E_INVAL,
				       "index %zu: %lld is outside the list's %llu rows",
				       i, v, (unsigned long long)limit);
			return -1;
		}
		out[i] = (uint32_t)v;
	}
	return 0;
}

/* (address, count, stride, kind, size) */
static int index_from_array(PyObject *array, uint32_t **out_p, size_t *count_p,
			    uint64_t limit)
{
	unsigned long long address;
	Py_ssize_t count, stride;
	unsigned int size;
	const char *kind;
	size_t bad;

	if (!PyArg_ParseTuple(array, "KnnsI", &address, &count, &stride, &kind, &size))
		return -1;
	*out_p = mem_zalloc(((size_t)count + 1) * sizeof(**out_p));
	if (!*out_p) {
		PyErr_NoMemory();
		return -1;
	}
	bad = rows_index(*out_p, (const void *)(uintptr_t)address, (size_t)count, stride,
			 *kind, size, limit);
	*count_p = (size_t)count;
	if (bad == SIZE_MAX || count == 0)
		return 0;
	ext_raise_code(KVD_E_INVAL, "index %zu is outside the list's %llu rows", bad,
		       (unsigned long long)limit);
	return -1;
}

/* A list or tuple of numbers, or ('array', address, …) as one tuple in a tuple of 1. */
static int index_take(PyObject *index, struct dlist *d, uint32_t **out_p, size_t *count_p)
{
	Py_ssize_t n;

	if (index == Py_None) {
		*count_p = (size_t)d->rows.rows;
		return 0;
	}
	if (PyTuple_Check(index) && PyTuple_Size(index) == 1 &&
	    PyTuple_Check(PyTuple_GetItem(index, 0)))
		return index_from_array(PyTuple_GetItem(index, 0), out_p, count_p,
					d->rows.rows);
	n = PyTuple_Check(index) ? PyTuple_Size(index) : PyList_Size(index);
	if (n < 0)
		return -1;
	*out_p = mem_zalloc(((size_t)n + 1) * sizeof(**out_p));
	if (!*out_p) {
		PyErr_NoMemory();
		return -1;
	}
	*count_p = (size_t)n;
	return index_from_list(index, *out_p, (size_t)n, d->rows.rows);
}

static int xfer_check(struct xfer *x, size_t locals, size_t remotes)
{
	size_t bad;

	if (locals != remotes || locals == 0) {
		ext_raise_code(KVD_E_INVAL,
			       locals ? "%zu local descriptors for %zu remote ones"
				      : "no descriptors (%zu local, %zu remote)",
			       locals, remotes);
		return -1;
	}
	x->count = locals;
	bad = rows_lengths(&x->local->rows, x->local_index, &x->remote->rows,
			   x->remote_index, locals, &x->bytes);
	if (bad == SIZE_MAX)
		return 0;
	ext_raise_code(KVD_E_INVAL, "descriptor %zu: the two sides' lengths differ", bad);
	return -1;
}

/* Pairs of rows without bytes are left out. */
static int xfer_skip_empty(struct xfer *x)
{
	uint32_t **index[] = {&x->local_index, &x->remote_index};

	if (!x->local->rows.empty)
		return 0;
	for (size_t side = 0; side < 2; side++) {
		if (*index[side])
			continue;
		*index[side] = mem_calloc(x->count, sizeof(uint32_t));
		if (!*index[side]) {
			PyErr_NoMemory();
			return -1;
		}
		for (size_t i = 0; i < x->count; i++)
			(*index[side])[i] = (uint32_t)i;
	}
	x->count = rows_drop_empty(&x->local->rows, x->local_index, x->remote_index,
				   x->count);
	return 0;
}

/* Xfer(op, local Dlist, index, remote Dlist, index, notif or None, pieces = 0): number of
 * pieces in telemetry; 0: after merging adjacent ones; negative: the number of rows */
static PyObject *xfer_make(PyTypeObject *type, PyObject *args,
			   PyObject *Py_UNUSED(kwargs))
{
	PyObject *local, *remote, *local_index, *remote_index, *notif;
	size_t locals = 0, remotes = 0;
	Py_ssize_t pieces = 0;
	struct xfer *x;
	int op;

	if (!PyArg_ParseTuple(args, "iO!OO!OO|n", &op, dlist_type, &local, &local_index,
			      dlist_type, &remote, &remote_index, &notif, &pieces))
		return NULL;
	if (((struct dlist *)local)->attach || !((struct dlist *)remote)->attach)
		return ext_raise_code(
			KVD_E_INVAL,
			"the sides are swapped: the %s list is of "
			"the %s side",
			((struct dlist *)local)->attach ? "local" : "remote",
			((struct dlist *)local)->attach ? "remote" : "local");
	if (((struct dlist *)local)->client != ((struct dlist *)remote)->client)
		return ext_raise_code(KVD_E_INVAL,
				      "the lists belong to different clients");
	x = ext_new(type, ((struct dlist *)local)->client);
	if (!x)
		return NULL;
	x->op = op == KVD_READ ? KVD_READ : KVD_WRITE;
	Py_INCREF(local);
	x->local = (struct dlist *)local;
	Py_INCREF(remote);
	x->remote = (struct dlist *)remote;
	if (notif != Py_None) {
		Py_INCREF(notif);
		x->notif = notif;
	}
	if (index_take(local_index, x->local, &x->local_index, &locals) == 0 &&
	    index_take(remote_index, x->remote, &x->remote_index, &remotes) == 0 &&
	    xfer_check(x, locals, remotes) == 0 && xfer_skip_empty(x) == 0) {
		x->pieces = pieces < 0 ? locals : (size_t)pieces;
		/* a short one is sent with its post: one wake-up */
		if (x->count > ROWS_WITH_POST && client_trylock(x->client)) {
			xfer_go(x);
			client_unlock(x->client);
		}
		return (PyObject *)x;
	}
	Py_DECREF(x);
	return NULL;
}

static void xfer_dealloc(PyObject *self)
{
	struct xfer *x = (struct xfer *)self;

	if (x->kvd && x->client->kvd)
		client_close_later(x->client, xfer_shut, x->kvd, NULL);
	mem_free(x->local_index);
	mem_free(x->remote_index);
	Py_XDECREF(x->notif);
	Py_XDECREF(x->local);
	Py_XDECREF(x->remote);
	ext_free(self);
}

/* ---- use
 * ------------------------------------------------------------------------------- */

/* post(notif or None) -> as poll() */
static PyObject *xfer_post(PyObject *self, PyObject *notif)
{
	struct xfer *x = (struct xfer *)self;

	PyObject *old = NULL;

	if (!client_lock(x->client))
		return NULL;
	if (!xfer_quiesced(x) || x->wanted) { /* another thread may have posted it */
		client_unlock(x->client);
		return ext_raise_code(KVD_E_BUSY, "the transfer is in progress");
	}
	x->begin_ns = clock_ns();
	x->end_ns = 0;
	memset(&x->error, 0, sizeof(x->error));
	if (notif != Py_None) {
		old = x->notif;
		Py_INCREF(notif);
		x->notif = notif;
		x->notif_new = true;
	}
	x->wanted = true;
	xfer_go(x);
	x->posted = true;
	/* the first transfer to a session that is being attached: its caller may not
	 * check again, but need not wait for a peer that does not connect */
	while (x->wanted && x->client->kvd && clock_ns() - x->begin_ns < FIRST_NS) {
		client_step(x->client);
		if (x->client->kvd)
			xfer_go(x);
	}
	client_flush(x->client);
	client_unlock(x->client);
	Py_XDECREF(old);
	x->post_ns = clock_ns() - x->begin_ns;
	return PyLong_FromLong(x->error.code ? -x->error.code : POLL_PROC);
}

/* rebind(attach): its remote list belongs to this attachment now. Between two posts. */
static PyObject *xfer_rebind(PyObject *self, PyObject *attach)
{
	struct xfer *x = (struct xfer *)self;
	struct dlist *d = x->remote;
	struct attach *old;

	if (Py_TYPE(attach) != attach_type ||
	    ((struct attach *)attach)->client != x->client) {
		PyErr_SetString(PyExc_ValueError,
				"attach: not an attachment of this client");
		return NULL;
	}
	if (!client_lock(x->client)) {
		PyErr_Clear(); /* its next use reports it */
		Py_RETURN_NONE;
	}
	old = d->attach;
	if (xfer_quiesced(x) && (PyObject *)old != attach) {
		if (d->kvd)
			client_close_later(d->client, dlist_shut, d->kvd, NULL);
		d->kvd = NULL;
		d->state = PENDING;
		d->answered = false;
		d->serial++;
		Py_INCREF(attach);
		d->attach = (struct attach *)attach;
		client_unlock(x->client);
		Py_DECREF(old);
	} else {
		client_unlock(x->client);
	}
	Py_RETURN_NONE;
}

static PyObject *xfer_poll_py(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct xfer *x = (struct xfer *)self;

	if (!x->client->kvd)
		return PyLong_FromLong(-KVD_E_STATE);
	return PyLong_FromLong(xfer_poll(x));
}

static PyObject *xfer_quiesced_py(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct xfer *x = (struct xfer *)self;

	return PyBool_FromLong(!x->client->kvd || xfer_quiesced(x));
}

/* Start to stop it; never waits. True: it has quiesced. */
static PyObject *xfer_stop(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct xfer *x = (struct xfer *)self;

	if (!x->client->kvd || xfer_quiesced(x)) {
		x->wanted = false;
		Py_RETURN_TRUE;
	}
	if (!client_lock(x->client))
		return NULL;
	if (x->kvd)
		kvd_xfer_cancel(x->kvd); /* refused: the next call retries */
	client_turn(x->client, false);
	client_unlock(x->client);
	return PyBool_FromLong(!x->client->kvd || xfer_quiesced(x));
}

/* Query the daemon for the failure's message, once. */
static void xfer_why(struct xfer *x)
{
	struct kvd_error why = {0};
	int r = -1;

	if (!x->kvd || x->error.message[0] || x->error.code >= KVD_E_GONE ||
	    !client_lock(x->client))
		return;
	if (x->kvd) { /* unchanged while waiting for the lock */
		Py_BEGIN_ALLOW_THREADS r = kvd_xfer_error(x->kvd, WHY_MS, &why);
		Py_END_ALLOW_THREADS
	}
	client_unlock(x->client);
	if (r == 0 && why.code == x->error.code)
		x->error = why;
}

/* (begin in ns of the monotonic clock, post µs, total µs, bytes, pieces) once it is done
 */
static PyObject *xfer_telemetry(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct xfer *x = (struct xfer *)self;

	if (!x->end_ns)
		Py_RETURN_NONE;
	if (!x->pieces)
		x->pieces = rows_merged(&x->local->rows, x->local_index, &x->remote->rows,
					x->remote_index, x->count);
	return Py_BuildValue("(KKKKn)", (unsigned long long)x->begin_ns,
			     (unsigned long long)(x->post_ns + 999) / 1000,
			     (unsigned long long)(x->end_ns - x->begin_ns + 999) / 1000,
			     (unsigned long long)x->bytes, (Py_ssize_t)x->pieces);
}

static PyObject *xfer_error(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct xfer *x = (struct xfer *)self;

	if (x->error.code && x->client->kvd)
		xfer_why(x);
	PyErr_Clear();
	return Py_BuildValue("(isi)", x->error.code, x->error.message,
			     (int)x->error.retryable);
}

static PyMethodDef xfer_methods[] = {
	{"post", xfer_post, METH_O, NULL},
	{"poll", xfer_poll_py, METH_NOARGS, NULL},
	{"quiesced", xfer_quiesced_py, METH_NOARGS, NULL},
	{"stop", xfer_stop, METH_NOARGS, NULL},
	{"rebind", xfer_rebind, METH_O, NULL},
	{"telemetry", xfer_telemetry, METH_NOARGS, NULL},
	{"error", xfer_error, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyMemberDef xfer_members[] = {
	{"posted", T_BOOL, offsetof(struct xfer, posted), READONLY, NULL},
	{"bytes", T_ULONGLONG, offsetof(struct xfer, bytes), READONLY, NULL},
	{NULL, 0, 0, 0, NULL},
};
static PyType_Slot xfer_slots[] = {
	{Py_tp_new, xfer_make},
	{Py_tp_dealloc, xfer_dealloc},
	{Py_tp_methods, xfer_methods},
	{Py_tp_members, xfer_members},
	{0, NULL},
};

/* ---- notifications
 * ----------------------------------------------------------------------- */

/* notif_send(client, attach, bytes): in order with the transfers posted before */
static PyObject *notif_send(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *client, *attach;
	struct client *c;
	const char *data;
	Py_ssize_t bytes;

	if (!PyArg_ParseTuple(args, "O!O!y#", client_type, &client, attach_type, &attach,
			      &data, &bytes))
		return NULL;
	c = (struct client *)client;
	if (!client_lock(c))
		return NULL;
	if (kvd_notif_send(c->kvd, ((struct attach *)attach)->number, data,
			   (size_t)bytes) < 0)
		return client_raise(c);
	client_flush(c);
	client_unlock(c);
	Py_RETURN_NONE;
}

/* notif_waiting(client) -> count: a read of shared memory, and a turn now and then */
static PyObject *notif_waiting(PyObject *Py_UNUSED(module), PyObject *client)
{
	struct client *c = (struct client *)client;
	uint64_t waiting;

	if (c->forks != ext_forks()) {
		client_lock(c); /* raises */
		return NULL;
	}
	if (!client_trylock(c)) /* the thread that has it takes turns */
		return PyLong_FromLong(0);
	client_turn(c, false);
	waiting = kvd_notif_waiting(c->kvd);
	client_unlock(c);
	return PyLong_FromUnsignedLongLong(waiting);
}

struct arrived {
	struct arrived *next;
	size_t bytes;
	char from[128];
	char data[];
};

struct arrivals {
	struct arrived *first, **end;
	bool short_of_memory;
};

static void on_notif(void *arg, const char *from, const void *data, size_t bytes)
{
	struct arrivals *all = arg;
	struct arrived *one = mem_zalloc(sizeof(*one) + bytes);

	if (!one) {
		all->short_of_memory = true;
		return;
	}
	one->bytes = bytes;
	strncpy(one->from, from, sizeof(one->from) - 1);
	memcpy(one->data, data, bytes);
	*all->end = one;
	all->end = &one->next;
}

static PyObject *arrivals_list(struct arrivals *all)
{
	PyObject *list = PyList_New(0);

	while (all->first) {
		struct arrived *one = all->first;
		PyObject *item = list ? Py_BuildValue("(sy#)", one->from, one->data,
						      (Py_ssize_t)one->bytes)
				      : NULL;

		if (item && PyList_Append(list, item) < 0)
			Py_CLEAR(list);
		else if (!item)
			Py_CLEAR(list);
		Py_XDECREF(item);
		all->first = one->next;
		mem_free(one);
	}
	if (all->short_of_memory && list) {
		Py_DECREF(list);
		return PyErr_NoMemory();
	}
	return list;
}

/* notif_drain(client) -> [(from, bytes)] */
static PyObject *notif_drain(PyObject *Py_UNUSED(module), PyObject *client)
{
	struct client *c = (struct client *)client;
	struct arrivals all = {.end = &all.first};
	int r;

	if (!client_lock(c))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_notif_drain(c->kvd, 1000, on_notif, &all);
	Py_END_ALLOW_THREADS if (r < 0)
	{
		Py_XDECREF(arrivals_list(&all));
		PyErr_Clear();
		return client_raise(c);
	}
	client_unlock(c);
	return arrivals_list(&all);
}

static PyMethodDef functions[] = {
	{"notif_send", notif_send, METH_VARARGS, NULL},
	{"notif_waiting", notif_waiting, METH_O, NULL},
	{"notif_drain", notif_drain, METH_O, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_xfer_init(PyObject *module)
{
	xfer_type = ext_type(module, "kvd._kvd.Xfer", sizeof(struct xfer), xfer_slots);
	if (!xfer_type)
		return -1;
	return PyModule_AddFunctions(module, functions);
}
