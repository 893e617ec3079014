/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One-sided transfers, as the nixl package stands on them.
 *
 * Nothing here waits. A list is checked in this process when it is made, and told
 * to the daemon behind that: a list of a remote session once the session is
 * attached, which may be much later. A transfer that is posted before its lists
 * are there is posted by whoever looks at it next. What the daemon refuses shows
 * as the transfer's failure.
 *
 * Looking at a transfer is a read of the status page. Only while a request of it
 * is unanswered must the socket be asked: `pending` is set before the request is
 * queued and cleared, under the lock, with its answer, because libkvd shows the
 * last run's end of a transfer whose next one was refused.
 *
 * An error that was told once stays until the next post, whatever the page says
 * later: whoever was told will not look for a success.
 */
#include "proto/python/src/ext.h"

#include <string.h>
#include <time.h>

#define CHECK_SPANS 16u

static PyTypeObject *attach_type, *dlist_type, *xfer_type;

enum { PENDING = 0, READY = 1, REFUSED = -1 };

/* ---- attachments ---------------------------------------------------------------------
 */

struct attach {
	PyObject_HEAD struct client *client;
	uint64_t number;
	int state;
	struct kvd_error error;
};

static void attach_ended(struct op *op)
{
	struct attach *a = op->arg;

	a->state = op->result < 0 ? REFUSED : READY;
	a->error = op->error;
}

static void attach_begin(struct attach *a, const char *endpoint,
			 const struct kvd_session_key *key, int ms)
{
	struct kvd_call call;
	struct op *op = op_new(a->client, (PyObject *)a, attach_ended, a, &call);

	call.timeout_ms = ms;
	if (op &&
	    kvd_peer_attach_begin(a->client->kvd, endpoint, key, &call, &a->number) == 0)
		return;
	a->state = REFUSED;
	if (op) {
		a->error = *kvd_last_error(a->client->kvd);
		op_cancel(op);
	}
}

static PyObject *attach_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"client", "endpoint", "epoch", "secret", "timeout", NULL};
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct kvd_session_key key = {0};
	PyObject *client, *timeout = NULL;
	const char *endpoint, *secret;
	unsigned long long epoch;
	struct attach *a;
	int ms;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!zKs|O", names, client_type,
					 &client, &endpoint, &epoch, &secret, &timeout) ||
	    ext_timeout(timeout, &ms) < 0)
		return NULL;
	key.epoch = epoch;
	strncpy(key.secret, secret, sizeof(key.secret) - 1);
	a = (struct attach *)alloc(type, 0);
	if (!a)
		return NULL;
	Py_INCREF(client);
	a->client = (struct client *)client;
	if (!client_lock(a->client)) {
		Py_DECREF(a);
		return NULL;
	}
	attach_begin(a, endpoint, &key, ms);
	client_unlock(a->client);
	return (PyObject *)a;
}

static void attach_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	Py_XDECREF(((struct attach *)self)->client);
	release(self);
	Py_DECREF(type);
}

/* 0 pending, 1 ready, negative: refused, with that code. */
static PyObject *attach_state(PyObject *self, PyObject *none)
{
	struct attach *a = (struct attach *)self;

	(void)none;
	if (a->state == PENDING && client_trylock(a->client)) {
		client_turn(a->client, true);
		client_unlock(a->client);
	}
	return PyLong_FromLong(a->state == REFUSED ? -a->error.code : a->state);
}

static PyObject *attach_error(PyObject *self, PyObject *none)
{
	(void)none;
	return PyUnicode_FromString(((struct attach *)self)->error.message);
}

static PyMethodDef attach_methods[] = {
	{"state", attach_state, METH_NOARGS, NULL},
	{"error", attach_error, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyType_Slot attach_slots[] = {
	{Py_tp_new, attach_make},
	{Py_tp_dealloc, attach_dealloc},
	{Py_tp_methods, attach_methods},
	{0, NULL},
};
static PyType_Spec attach_spec = {
	.name = "kvd._kvd.Attach",
	.basicsize = sizeof(struct attach),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = attach_slots,
};

/* ---- descriptor lists ---------------------------------------------------------------
 */

struct dlist {
	PyObject_HEAD struct client *client;
	struct attach *attach; /* NULL: own memory */
	struct rows rows;
	struct kvd_dlist *kvd;
	int state;
	struct kvd_error error;
};

static void dlist_ended(struct op *op)
{
	struct dlist *d = op->arg;

	d->state = op->result < 0 ? REFUSED : READY;
	d->error = op->error;
}

/* Tell the daemon, if it is time. With the lock. */
static int dlist_go(struct dlist *d)
{
	struct kvd_call call;
	struct op *op;

	if (d->state != PENDING || d->kvd || (d->attach && d->attach->state == PENDING))
		return d->state;
	if (d->attach && d->attach->state == REFUSED) {
		d->state = REFUSED;
		d->error = d->attach->error;
		return d->state;
	}
	op = op_new(d->client, (PyObject *)d, dlist_ended, d, &call);
	if (op && kvd_dlist_prep(d->client->kvd, d->attach ? d->attach->number : 0,
				 d->rows.entries, d->rows.count, &call, &d->kvd) == 0)
		return d->state;
	d->state = REFUSED;
	if (op) {
		d->error = *kvd_last_error(d->client->kvd);
		op_cancel(op);
	}
	return d->state;
}

static PyObject *rows_raise(enum rows_fault fault, const uint64_t *row, size_t at)
{
	static const char *const words[] = {
		[ROWS_RANGE] = "is not within one registered region",
		[ROWS_EMPTY] = "has no bytes",
		[ROWS_STRIDE] = "has a count of 0, or a stride below its length",
	};

	if (fault == ROWS_NOMEM)
		return PyErr_NoMemory();
	return ext_raise_code(fault == ROWS_RANGE ? KVD_E_NOTFOUND : KVD_E_INVAL,
			      "descriptor %zu [%#llx, +%llu) %s", at,
			      (unsigned long long)row[0], (unsigned long long)row[1],
			      words[fault]);
}

/* Dlist(client, attach or None, table address, rows, columns, spans as bytes) */
static PyObject *dlist_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	PyObject *client, *attach;
	unsigned long long table;
	Py_ssize_t count, span_bytes;
	enum rows_fault fault;
	unsigned int columns;
	const char *spans;
	struct dlist *d;
	size_t at;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "O!OKnIy#", client_type, &client, &attach, &table,
			      &count, &columns, &spans, &span_bytes))
		return NULL;
	d = (struct dlist *)alloc(type, 0);
	if (!d)
		return NULL;
	Py_INCREF(client);
	d->client = (struct client *)client;
	if (attach != Py_None) {
		Py_INCREF(attach);
		d->attach = (struct attach *)attach;
	}
	Py_BEGIN_ALLOW_THREADS fault =
		rows_make(&d->rows, (const uint64_t *)(uintptr_t)table, (size_t)count,
			  columns, (const struct span *)(const void *)spans,
			  (size_t)span_bytes / sizeof(struct span), &at);
	Py_END_ALLOW_THREADS if (fault != ROWS_OK)
	{
		Py_DECREF(d);
		return rows_raise(fault,
				  (const uint64_t *)(uintptr_t)table + at * columns, at);
	}
	if (!client_lock(d->client)) {
		Py_DECREF(d);
		return NULL;
	}
	dlist_go(d);
	client_unlock(d->client);
	return (PyObject *)d;
}

static int dlist_shut(void *handle, const struct kvd_call *call)
{
	return kvd_dlist_free(handle, call);
}

static void dlist_dealloc(PyObject *self)
{
	struct dlist *d = (struct dlist *)self;
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	if (d->kvd && d->client->kvd)
		client_bury(d->client, dlist_shut, d->kvd, NULL);
	rows_fini(&d->rows);
	Py_XDECREF(d->attach);
	Py_XDECREF(d->client);
	release(self);
	Py_DECREF(type);
}

static Py_ssize_t dlist_length(PyObject *self)
{
	return (Py_ssize_t)((struct dlist *)self)->rows.rows;
}

static PyObject *dlist_entries(PyObject *self, void *closure)
{
	(void)closure;
	return PyLong_FromSize_t(((struct dlist *)self)->rows.count);
}

static PyObject *dlist_remote(PyObject *self, void *closure)
{
	(void)closure;
	return PyBool_FromLong(((struct dlist *)self)->attach != NULL);
}

static PyGetSetDef dlist_getset[] = {
	{"entries", dlist_entries, NULL, NULL, NULL},
	{"remote", dlist_remote, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot dlist_slots[] = {
	{Py_tp_new, dlist_make},
	{Py_tp_dealloc, dlist_dealloc},
	{Py_tp_getset, dlist_getset},
	{Py_sq_length, dlist_length},
	{0, NULL},
};
static PyType_Spec dlist_spec = {
	.name = "kvd._kvd.Dlist",
	.basicsize = sizeof(struct dlist),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = dlist_slots,
};

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
	struct kvd_xfer *kvd;
	bool posted; /* ever */
	bool wanted; /* posted, and not yet told to the daemon */
	bool stopped;
	_Atomic bool pending;	/* a start is unanswered */
	struct kvd_error error; /* told once: it stays */
	uint64_t post_ns, begin_ns, end_ns;
	size_t pieces; /* 0: not counted yet */
};

static void xfer_ended(struct op *op)
{
	struct xfer *x = op->arg;

	if (op->result < 0 && !x->error.code)
		x->error = op->error;
	atomic_store(&x->pending, false);
}

static int xfer_shut(void *handle, const struct kvd_call *call)
{
	return kvd_xfer_release(handle, call);
}

static int xfer_stop_now(void *handle, const struct kvd_call *call)
{
	return kvd_xfer_cancel(handle, call);
}

static int xfer_ask(struct xfer *x, const struct kvd_call *call)
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
	return kvd_xfer_start(x->client->kvd, &a, call, &x->kvd);
}

/* Give it to the daemon if both lists are there. With the lock and the GIL. */
static void xfer_go(struct xfer *x)
{
	int local = dlist_go(x->local), remote = dlist_go(x->remote), r;
	struct kvd_call call;
	struct op *op;

	if (!x->wanted)
		return;
	if (local == REFUSED || remote == REFUSED) {
		x->wanted = false;
		x->error = local == REFUSED ? x->local->error : x->remote->error;
		return;
	}
	if (local != READY || remote != READY)
		return;
	op = op_new(x->client, (PyObject *)x, xfer_ended, x, &call);
	if (!op)
		return;
	x->wanted = false;
	atomic_store(&x->pending, true);
	r = x->kvd ? kvd_xfer_again(x->kvd, &call) : xfer_ask(x, &call);
	if (r == 0)
		return;
	atomic_store(&x->pending, false);
	x->error = *kvd_last_error(x->client->kvd);
	op_cancel(op);
}

/* What libkvd says, and whether anything may still move. */
static int xfer_look(struct xfer *x, struct kvd_room_status *st)
{
	memset(st, 0, sizeof(*st));
	if ((x->wanted || atomic_load(&x->pending)) && client_trylock(x->client)) {
		client_turn(x->client, true);
		xfer_go(x);
		client_unlock(x->client);
	}
	if (x->wanted || atomic_load(&x->pending)) {
		st->state = KVD_BOOTSTRAPPING;
		/* the daemon that shall answer may be gone */
		if (x->kvd && kvd_xfer_read(x->kvd, st) == 0 && st->state == KVD_SUCCESS)
			st->state = KVD_BOOTSTRAPPING;
		return 0;
	}
	if (!x->kvd || x->error.code) {
		if (x->kvd && kvd_xfer_read(x->kvd, st) == 0)
			return 0;
		st->state = KVD_FAILED;
		return 0;
	}
	return kvd_xfer_read(x->kvd, st);
}

/* 1: under way, 0: done, negative: -code, and it stays. */
static int xfer_poll(struct xfer *x)
{
	struct kvd_room_status st;

	if (x->error.code)
		return -x->error.code;
	if (xfer_look(x, &st) < 0)
		st = (struct kvd_room_status){.state = KVD_FAILED, .error = KVD_E_GONE};
	if (x->error.code)
		return -x->error.code;
	if (st.state == KVD_SUCCESS) {
		if (!x->end_ns)
			x->end_ns = ext_now_ns();
		return 0;
	}
	if (st.state != KVD_FAILED && !(st.flags & KVD_FLAG_ABORTING))
		return 1;
	x->error = (struct kvd_error){.code = st.error ? st.error : KVD_E_LOST,
				      .retryable = st.retryable};
	return -x->error.code;
}

/* Whether nothing of it can move any more. */
static bool xfer_still(struct xfer *x)
{
	struct kvd_room_status st;

	if (!x->posted || (x->wanted && !x->kvd))
		return true;
	if (x->wanted || atomic_load(&x->pending)) {
		xfer_look(x, &st);
		if (x->wanted)
			return true; /* the run before has ended, this one has not begun
				      */
		if (atomic_load(&x->pending))
			return x->kvd && kvd_xfer_state(x->kvd) == KVD_FAILED;
	}
	if (!x->kvd)
		return true;
	return kvd_xfer_read(x->kvd, &st) < 0 || st.state == KVD_FAILED ||
	       st.state == KVD_SUCCESS;
}

/* ---- their making: index lists in any of the forms that engines use -------------------
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

/* Xfer(op, local Dlist, index, remote Dlist, index, notif or None) */
static PyObject *xfer_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	PyObject *local, *remote, *local_index, *remote_index, *notif;
	size_t locals = 0, remotes = 0;
	struct xfer *x;
	int op;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "iO!OO!OO", &op, dlist_type, &local, &local_index,
			      dlist_type, &remote, &remote_index, &notif))
		return NULL;
	if (((struct dlist *)local)->attach || !((struct dlist *)remote)->attach)
		return ext_raise_code(
			KVD_E_INVAL,
			"the sides are swapped: the %s list is of "
			"the %s side",
			((struct dlist *)local)->attach ? "local" : "remote",
			((struct dlist *)local)->attach ? "remote" : "local");
	x = (struct xfer *)alloc(type, 0);
	if (!x)
		return NULL;
	x->op = op == KVD_READ ? KVD_READ : KVD_WRITE;
	Py_INCREF(local);
	x->local = (struct dlist *)local;
	Py_INCREF(remote);
	x->remote = (struct dlist *)remote;
	x->client = x->local->client;
	Py_INCREF(x->client);
	if (notif != Py_None) {
		Py_INCREF(notif);
		x->notif = notif;
	}
	if (index_take(local_index, x->local, &x->local_index, &locals) == 0 &&
	    index_take(remote_index, x->remote, &x->remote_index, &remotes) == 0 &&
	    xfer_check(x, locals, remotes) == 0)
		return (PyObject *)x;
	Py_DECREF(x);
	return NULL;
}

static void xfer_dealloc(PyObject *self)
{
	struct xfer *x = (struct xfer *)self;
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	if (x->kvd && x->client->kvd)
		client_bury(x->client, xfer_shut, x->kvd, NULL);
	mem_free(x->local_index);
	mem_free(x->remote_index);
	Py_XDECREF(x->notif);
	Py_XDECREF(x->local);
	Py_XDECREF(x->remote);
	Py_XDECREF(x->client);
	release(self);
	Py_DECREF(type);
}

/* ---- what is done with them
 * ------------------------------------------------------------- */

/* A notification of this post only: libkvd posts again with the words of before,
 * so this is another transfer. */
static void xfer_renew(struct xfer *x, PyObject *notif)
{
	Py_XDECREF(x->notif);
	Py_INCREF(notif);
	x->notif = notif;
	if (x->kvd)
		client_bury(x->client, xfer_shut, x->kvd, NULL);
	x->kvd = NULL;
}

/* post(notif or None) -> as poll() */
static PyObject *xfer_post(PyObject *self, PyObject *notif)
{
	struct xfer *x = (struct xfer *)self;

	if (!xfer_still(x) || (x->wanted && !x->error.code))
		return ext_raise_code(KVD_E_BUSY, "the transfer is under way");
	x->begin_ns = ext_now_ns();
	x->end_ns = 0;
	memset(&x->error, 0, sizeof(x->error));
	x->stopped = false;
	if (notif != Py_None)
		xfer_renew(x, notif);
	if (!client_lock(x->client))
		return NULL;
	x->posted = x->wanted = true;
	xfer_go(x);
	client_unlock(x->client);
	x->post_ns = ext_now_ns() - x->begin_ns;
	return PyLong_FromLong(x->error.code ? -x->error.code : 1);
}

static PyObject *xfer_poll_py(PyObject *self, PyObject *none)
{
	struct xfer *x = (struct xfer *)self;

	(void)none;
	if (!x->client->kvd)
		return PyLong_FromLong(-KVD_E_STATE);
	return PyLong_FromLong(xfer_poll(x));
}

static PyObject *xfer_still_py(PyObject *self, PyObject *none)
{
	struct xfer *x = (struct xfer *)self;

	(void)none;
	return PyBool_FromLong(!x->client->kvd || xfer_still(x));
}

/* Begin to stop it; never waits. True: it is still. */
static PyObject *xfer_stop(PyObject *self, PyObject *none)
{
	struct xfer *x = (struct xfer *)self;
	struct kvd_call call;
	struct op *op;

	(void)none;
	if (!x->client->kvd || xfer_still(x)) {
		x->wanted = false;
		Py_RETURN_TRUE;
	}
	if (!client_lock(x->client))
		return NULL;
	if (!x->stopped && !atomic_load(&x->pending)) {
		op = op_new(x->client, (PyObject *)x, NULL, NULL, &call);
		if (op && xfer_stop_now(x->kvd, &call) == 0)
			x->stopped = true;
		else if (op)
			op_cancel(op);
	}
	client_turn(x->client, true);
	client_unlock(x->client);
	return PyBool_FromLong(xfer_still(x));
}

/* (begin in ns of the monotonic clock, post µs, total µs, bytes, pieces) once it is done
 */
static PyObject *xfer_telemetry(PyObject *self, PyObject *none)
{
	struct xfer *x = (struct xfer *)self;

	(void)none;
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

static PyObject *xfer_error(PyObject *self, PyObject *none)
{
	struct xfer *x = (struct xfer *)self;

	(void)none;
	return Py_BuildValue("(isi)", x->error.code, x->error.message,
			     (int)x->error.retryable);
}

static PyObject *xfer_get(PyObject *self, void *what)
{
	struct xfer *x = (struct xfer *)self;

	if (what)
		return PyLong_FromUnsignedLongLong(x->bytes);
	return PyBool_FromLong(x->posted);
}

static PyMethodDef xfer_methods[] = {
	{"post", xfer_post, METH_O, NULL},
	{"poll", xfer_poll_py, METH_NOARGS, NULL},
	{"still", xfer_still_py, METH_NOARGS, NULL},
	{"stop", xfer_stop, METH_NOARGS, NULL},
	{"telemetry", xfer_telemetry, METH_NOARGS, NULL},
	{"error", xfer_error, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyGetSetDef xfer_getset[] = {
	{"posted", xfer_get, NULL, NULL, NULL},
	{"bytes", xfer_get, NULL, NULL, (void *)1},
	{NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot xfer_slots[] = {
	{Py_tp_new, xfer_make},
	{Py_tp_dealloc, xfer_dealloc},
	{Py_tp_methods, xfer_methods},
	{Py_tp_getset, xfer_getset},
	{0, NULL},
};
static PyType_Spec xfer_spec = {
	.name = "kvd._kvd.Xfer",
	.basicsize = sizeof(struct xfer),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = xfer_slots,
};

/* ---- notifications
 * ----------------------------------------------------------------------- */

struct notif_start {
	struct client *c;
	uint64_t attach;
	const char *data;
	size_t bytes;
};

static int notif_begin(void *ctx, const struct kvd_call *call)
{
	struct notif_start *s = ctx;

	return kvd_notif_send(s->c->kvd, s->attach, s->data, s->bytes, call);
}

/* notif_send(client, attach, bytes, timeout) */
static PyObject *notif_send(PyObject *module, PyObject *args)
{
	PyObject *client, *attach, *timeout = NULL;
	struct notif_start start;
	Py_ssize_t bytes;
	int ms;

	(void)module;
	if (!PyArg_ParseTuple(args, "O!O!y#|O", client_type, &client, attach_type,
			      &attach, &start.data, &bytes, &timeout) ||
	    ext_timeout(timeout, &ms) < 0)
		return NULL;
	start.c = (struct client *)client;
	start.attach = ((struct attach *)attach)->number;
	start.bytes = (size_t)bytes;
	if (client_run(start.c, notif_begin, &start, ms, NULL, NULL) < 0)
		return NULL;
	Py_RETURN_NONE;
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
static PyObject *notif_drain(PyObject *module, PyObject *client)
{
	struct client *c = (struct client *)client;
	struct arrivals all = {.end = &all.first};
	int r;

	(void)module;
	if (!client_lock(c))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_notif_drain(c->kvd, 1000, on_notif, &all);
	Py_END_ALLOW_THREADS if (r < 0)
	{
		Py_XDECREF(arrivals_list(&all));
		PyErr_Clear();
		return client_raise(c, kvd_last_error(c->kvd));
	}
	client_unlock(c);
	return arrivals_list(&all);
}

static PyMethodDef functions[] = {
	{"notif_send", notif_send, METH_VARARGS, NULL},
	{"notif_drain", notif_drain, METH_O, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_xfer_init(PyObject *module)
{
	attach_type = (PyTypeObject *)ext_type(module, "Attach", &attach_spec);
	dlist_type = (PyTypeObject *)ext_type(module, "Dlist", &dlist_spec);
	xfer_type = (PyTypeObject *)ext_type(module, "Xfer", &xfer_spec);
	if (!attach_type || !dlist_type || !xfer_type)
		return -1;
	return PyModule_AddFunctions(module, functions);
}
