/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attachments and descriptor lists: the base of transfers.
 *
 * A list is checked in this process when it is made, against its owner's metadata, so
 * that a caller's mistake is an exception of that call. The daemon gets the list later:
 * a list of a remote session once the session is attached, which takes a round trip to
 * another host and must not delay the caller. The next user of the list moves it on
 * (dlist_go()).
 */
#include "python/src/ext.h"

#include <stdio.h>
#include <string.h>

PyTypeObject *attach_type, *dlist_type;

/* ---- attachments ---------------------------------------------------------------------
 */

static void attach_ended(struct op *op);

/* The knowledge of its session's daemon; pending until that has answered. */
static void attach_ask(struct attach *a)
{
	struct kvd_call call;
	struct op *op = op_new(a->client, (PyObject *)a, attach_ended, a, &call);

	a->state = PENDING;
	a->stale = false;
	call.timeout_ms = a->ms;
	if (op && kvd_peer_refresh(a->client->kvd, a->number, &call) == 0)
		return;
	a->state = REFUSED;
	if (op) {
		a->error = *kvd_last_error(a->client->kvd);
		op_cancel(op);
	}
}

static void attach_ended(struct op *op)
{
	struct attach *a = op->arg;

	if (a->state != PENDING)
		return; /* refuse() was called */
	a->state = op->result < 0 ? REFUSED : READY;
	a->error = op->error;
	if (a->state == READY && a->stale)
		attach_ask(a);
}

static void attach_begin(struct attach *a, const char *endpoint,
			 const struct kvd_session_key *key, int ms)
{
	struct kvd_call call;
	struct op *op = op_new(a->client, (PyObject *)a, attach_ended, a, &call);

	call.timeout_ms = ms;
	if (op && kvd_peer_attach(a->client->kvd, endpoint, key, &call, &a->number) == 0)
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
	struct kvd_session_key key = {0};
	PyObject *client;
	const char *endpoint, *secret;
	unsigned long long epoch;
	struct attach *a;
	int ms = 0;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!zKs|O&", names, client_type,
					 &client, &endpoint, &epoch, &secret, ext_timeout,
					 &ms))
		return NULL;
	key.epoch = epoch;
	strncpy(key.secret, secret, sizeof(key.secret) - 1);
	a = ext_new(type, (struct client *)client);
	if (!a)
		return NULL;
	if (!client_lock(a->client)) {
		Py_DECREF(a);
		return NULL;
	}
	attach_begin(a, endpoint, &key, ms);
	client_unlock(a->client);
	return (PyObject *)a;
}

/* 0 pending, 1 ready, negative: refused, with that code. */
static PyObject *attach_state(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct attach *a = (struct attach *)self;

	if (a->state == PENDING && client_trylock(a->client)) {
		client_turn(a->client, true);
		client_unlock(a->client);
	}
	return PyLong_FromLong(a->state == REFUSED ? -a->error.code : a->state);
}

static PyObject *attach_error(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct attach *a = (struct attach *)self;
	struct kvd_error error;

	if (client_lock(a->client)) { /* an answer may write it in any thread's turn */
		error = a->error;
		client_unlock(a->client);
	} else { /* no answer is received any more */
		PyErr_Clear();
		error = a->error;
	}
	return PyUnicode_DecodeUTF8(error.message, (Py_ssize_t)strlen(error.message),
				    "replace");
}

static int attached_begin(void *ctx, const struct kvd_call *call)
{
	struct attach *a = ctx;

	return kvd_peer_attached(a->client->kvd, a->number, call);
}

/* check(timeout): query the daemon whether the session exists; raises if it does not. */
static PyObject *attach_check(PyObject *self, PyObject *timeout)
{
	struct attach *a = (struct attach *)self;
	struct run run = {.client = a->client, .start = attached_begin, .ctx = a};

	if (!ext_timeout(timeout, &run.timeout_ms))
		return NULL;
	if (a->state == READY && client_run(&run, NULL) < 0)
		return NULL;
	return attach_state(self, NULL);
}

/* refresh(timeout): pending again, until its session's daemon has reported its current
 * regions. Lists that are made meanwhile wait for it. */
static PyObject *attach_refresh(PyObject *self, PyObject *timeout)
{
	struct attach *a = (struct attach *)self;
	int ms;

	if (!ext_timeout(timeout, &ms) || !client_lock(a->client))
		return NULL;
	a->ms = ms;
	if (a->state == READY)
		attach_ask(a);
	else
		a->stale = true; /* an answer in transit may be older */
	client_unlock(a->client);
	Py_RETURN_NONE;
}

/* refuse(number, message): the error raised by check() ends it. */
static PyObject *attach_refuse(PyObject *self, PyObject *args)
{
	struct attach *a = (struct attach *)self;
	const char *message;
	int code;

	if (!PyArg_ParseTuple(args, "is", &code, &message) || !client_lock(a->client))
		return NULL;
	a->error = (struct kvd_error){.code = code, .scope = "peer"};
	snprintf(a->error.message, sizeof(a->error.message), "%s", message);
	a->state = REFUSED;
	client_unlock(a->client);
	Py_RETURN_NONE;
}

static PyMethodDef attach_methods[] = {
	{"check", attach_check, METH_O, NULL},
	{"refresh", attach_refresh, METH_O, NULL},
	{"refuse", attach_refuse, METH_VARARGS, NULL},
	{"state", attach_state, METH_NOARGS, NULL},
	{"error", attach_error, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyType_Slot attach_slots[] = {
	{Py_tp_new, attach_make},
	{Py_tp_dealloc, ext_free},
	{Py_tp_methods, attach_methods},
	{0, NULL},
};

/* ---- descriptor lists ---------------------------------------------------------------
 */

/* Send it to the daemon. */
static int dlist_tell(struct dlist *d)
{
	uint64_t attach = d->attach ? d->attach->number : 0;
	cleanup_free struct kvd_desc *filled = NULL;
	const struct kvd_desc *entries = d->rows.entries;
	int r;

	if (d->rows.empty) {
		filled = rows_filled(&d->rows);
		if (!filled)
			return -KVD_E_BUSY; /* retried */
		entries = filled;
	}
	r = kvd_dlist_prep(d->client->kvd, attach, entries, d->rows.count, 4, &d->kvd);
	d->answered = r == 0 && kvd_dlist_state(d->kvd) == -KVD_E_BUSY;
	return r;
}

static int dlist_refuse(struct dlist *d, const struct kvd_error *error)
{
	d->error = *error;
	return d->state = REFUSED;
}

int dlist_go(struct dlist *d)
{
	int r = 0, state = 1;

	if (d->state != PENDING)
		return d->state;
	if (d->attach && d->attach->state == REFUSED)
		return dlist_refuse(d, &d->attach->error);
	if (d->attach && d->attach->state == PENDING)
		return PENDING;
	if (d->rows.empty == d->rows.count) /* no transfer will name it to the daemon */
		return READY;
	if (!d->kvd)
		r = dlist_tell(d);
	d->busy = r == -KVD_E_BUSY;
	if (r == -KVD_E_FULL || d->busy || r == -KVD_E_LOST)
		return PENDING;
	if (r < 0)
		return dlist_refuse(d, kvd_last_error(d->client->kvd));
	if (d->answered)
		state = kvd_dlist_state(d->kvd);
	if (state == -KVD_E_BUSY)
		return PENDING;
	if (state == 1)
		return d->state = READY;
	d->error = (struct kvd_error){.code = -state};
	kvd_dlist_error(d->kvd, 0, &d->error); /* its text is copied */
	return d->state = REFUSED;
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
static PyObject *dlist_make(PyTypeObject *type, PyObject *args,
			    PyObject *Py_UNUSED(kwargs))
{
	PyObject *client, *attach;
	unsigned long long table;
	Py_ssize_t count, span_bytes;
	enum rows_fault fault;
	unsigned int columns;
	const char *spans;
	struct dlist *d;
	size_t at;

	if (!PyArg_ParseTuple(args, "O!OKnIy#", client_type, &client, &attach, &table,
			      &count, &columns, &spans, &span_bytes))
		return NULL;
	if (attach != Py_None &&
	    (Py_TYPE(attach) != attach_type ||
	     ((struct attach *)attach)->client != (struct client *)client)) {
		PyErr_SetString(PyExc_ValueError,
				"attach: not an attachment of this client");
		return NULL;
	}
	d = ext_new(type, (struct client *)client);
	if (!d)
		return NULL;
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

int dlist_shut(void *handle, const struct kvd_call *call)
{
	int r = kvd_dlist_release(handle);

	(void)call;
	return r < 0 ? r : 1;
}

static void dlist_dealloc(PyObject *self)
{
	struct dlist *d = (struct dlist *)self;

	if (d->kvd && d->client->kvd)
		client_close_later(d->client, dlist_shut, d->kvd, NULL);
	rows_fini(&d->rows);
	Py_XDECREF(d->attach);
	ext_free(self);
}

static Py_ssize_t dlist_length(PyObject *self)
{
	return (Py_ssize_t)((struct dlist *)self)->rows.rows;
}

static PyObject *dlist_remote(PyObject *self, void *Py_UNUSED(closure))
{
	return PyBool_FromLong(((struct dlist *)self)->attach != NULL);
}

static PyMemberDef dlist_members[] = {
	{"entries", T_PYSSIZET, offsetof(struct dlist, rows.count), READONLY, NULL},
	{NULL, 0, 0, 0, NULL},
};
static PyGetSetDef dlist_getset[] = {
	{"remote", dlist_remote, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot dlist_slots[] = {
	{Py_tp_new, dlist_make},	{Py_tp_dealloc, dlist_dealloc},
	{Py_tp_members, dlist_members}, {Py_tp_getset, dlist_getset},
	{Py_sq_length, dlist_length},	{0, NULL},
};

/* ---- tables from Python's own lists
 * ----------------------------------------------------- */

static bool row_take(PyObject *row, Py_ssize_t width, uint64_t *out)
{
	if (!PyTuple_Check(row) || PyTuple_Size(row) != width)
		return false;
	for (Py_ssize_t i = 0; i < 3; i++) {
		PyObject *item = PyTuple_GetItem(row, i);

		if (!PyLong_Check(item))
			return false;
		out[i] = PyLong_AsUnsignedLongLong(item);
		if (out[i] == UINT64_MAX && PyErr_Occurred())
			return false;
	}
	return true;
}

/* table(list of tuples, width) -> bytes of (address, bytes, device), or None if a row is
 * not such a tuple: the caller makes the message. */
static PyObject *table(PyObject *Py_UNUSED(module), PyObject *args)
{
	Py_ssize_t width, n;
	PyObject *list, *bytes;
	uint64_t *out;

	if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &list, &width))
		return NULL;
	n = PyList_Size(list);
	bytes = PyBytes_FromStringAndSize(NULL, n * 24);
	if (!bytes)
		return NULL;
	out = (uint64_t *)(void *)PyBytes_AsString(bytes);
	for (Py_ssize_t i = 0; i < n; i++) {
		if (row_take(PyList_GetItem(list, i), width, out + 3 * i))
			continue;
		PyErr_Clear();
		Py_DECREF(bytes);
		Py_RETURN_NONE;
	}
	return bytes;
}

static PyMethodDef functions[] = {
	{"table", table, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_lists_init(PyObject *module)
{
	attach_type =
		ext_type(module, "kvd._kvd.Attach", sizeof(struct attach), attach_slots);
	dlist_type =
		ext_type(module, "kvd._kvd.Dlist", sizeof(struct dlist), dlist_slots);
	return attach_type && dlist_type ? PyModule_AddFunctions(module, functions) : -1;
}
