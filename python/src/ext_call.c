/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls with an answer of the daemon, and the handles that they use and close.
 *
 * A call is started under the lock and waited for without it. So between checking its
 * arguments and starting it, and before each retry, other threads have had the client and
 * may have closed the objects that it names. Therefore handles are read from their
 * objects under the lock, at each start (struct use), and never kept from one to the
 * next. Counting the users of a handle, so that a closing waits for zero, was rejected: a
 * closing from a callback or a finaliser would wait for its own thread.
 *
 * libkvd frees a handle in the turn that receives the answer to its closing, and that
 * turn may be any thread's, without the GIL. So the object gives up its handle before the
 * closing is sent, and gets it back if that is refused. Until then every other call finds
 * it closed, and a second closing is queued (op->also) for the same end, which is also
 * reached when the first thread was interrupted: the memory that the object keeps is
 * released by the answer, not by the thread that waits for it.
 */
#include "daemon/base/clock.h"
#include "python/src/ext.h"

#include <string.h>

static void op_free(struct op *op)
{
	Py_XDECREF(op->callback);
	Py_XDECREF(op->keep);
	Py_XDECREF(op->drop);
	mem_free(op->json);
	mem_free(op);
}

/* callback(answer or None, exception or None) */
void op_tell(struct op *op)
{
	PyObject *kind = NULL, *error = NULL, *trace = NULL, *answer = NULL, *r;

	if (op->callback && op->result < 0) {
		ext_raise(&op->error);
		PyErr_Fetch(&kind, &error, &trace);
		PyErr_NormalizeException(&kind, &error, &trace);
	} else if (op->callback && op->json) {
		answer = PyUnicode_DecodeUTF8(op->json, (Py_ssize_t)strlen(op->json),
					      "replace");
	}
	if (op->callback) {
		r = PyObject_CallFunctionObjArgs(op->callback, answer ? answer : Py_None,
						 error ? error : Py_None, NULL);
		if (!r)
			PyErr_WriteUnraisable(op->callback);
		Py_XDECREF(r);
	}
	Py_XDECREF(kind);
	Py_XDECREF(error);
	Py_XDECREF(trace);
	Py_XDECREF(answer);
	op_free(op);
}

/* ---- ends of calls --------------------------------------------------------------- */

/* With those that end together with it; under the lock, with or without the GIL. */
static void op_end(struct op *op, int result, const struct kvd_error *error)
{
	struct client *c = op->client;

	for (struct op *also; op; op = also) {
		also = op->also;
		list_remove(&op->link);
		op->result = result;
		if (error)
			op->error = *error;
		op->done = true;
		if (op->end)
			op->end(op);
		if (op->callback || op->abandoned) {
			*c->told_end = op;
			c->told_end = &op->next;
		}
	}
}

static void on_done(void *arg, int result, const struct kvd_reply *reply)
{
	struct op *op = arg;

	if (op->want_json && reply->json)
		op->json = mem_strdup(reply->json);
	op_end(op, result, reply->error);
}

static const struct kvd_error client_gone = {
	.code = KVD_E_LOST, .scope = "session", .message = "the client was closed"};

void ops_end(struct client *c)
{
	struct op *op;

	while ((op = list_first(&c->ops, struct op, link)))
		op_end(op, -client_gone.code, &client_gone);
}

static void op_init(struct op *op, struct client *c, struct kvd_call *call_p)
{
	op->client = c;
	list_push_back(&c->ops, &op->link);
	call_p->on_done = on_done;
	call_p->arg = op;
}

struct op *op_new(struct client *c, PyObject *keep, void (*end)(struct op *op), void *arg,
		  struct kvd_call *call_p)
{
	struct op *op = mem_zalloc(sizeof(*op));

	if (!op)
		return NULL;
	*call_p = (struct kvd_call){0};
	op_init(op, c, call_p);
	op->abandoned = true; /* freed at its end */
	op->end = end;
	op->arg = arg;
	Py_XINCREF(keep);
	op->keep = keep;
	return op;
}

void op_cancel(struct op *op)
{
	list_remove(&op->link);
	op_free(op);
}

/* ---- starting and waiting ---------------------------------------------------------- */

static void closed_error(const struct handle *h, struct kvd_error *error_p)
{
	char number[24] = "";

	*error_p = (struct kvd_error){.code = KVD_E_STATE, .scope = "op"};
	if (h->number)
		snprintf(number, sizeof(number), " %llu", (unsigned long long)h->number);
	snprintf(error_p->message, sizeof(error_p->message), "%s%s: closed", h->noun,
		 number);
}

/* 0, or negative with *error_p; under the lock. */
static int uses_take(const struct run *run, struct kvd_error *error_p)
{
	for (size_t i = 0; i < run->use_count; i++) {
		const struct use *use = &run->uses[i];
		void *kvd = use->of ? use->of->kvd : NULL;

		if (!use->of)
			continue;
		if (!kvd) {
			closed_error(use->of, error_p);
			return -error_p->code;
		}
		memcpy(use->to, &kvd, sizeof(kvd));
	}
	return 0;
}

/* 0, 1: done, negative with *error_p. */
static int run_begin(const struct run *run, const struct kvd_call *call,
		     struct kvd_error *error_p)
{
	struct client *c = run->client;
	int r = uses_take(run, error_p);

	if (r < 0)
		return r;
	r = run->start(run->ctx, call);
	if (r < 0)
		*error_p = *kvd_last_error(c->kvd);
	return r;
}

/* Started once there is a session: the restart of a daemon is waited for. Negative
 * without an exception: with *error_p. */
static int run_begin_waiting(const struct run *run, const struct kvd_call *call,
			     struct kvd_error *error_p)
{
	struct client *c = run->client;
	int ms = call->timeout_ms > 0 ? call->timeout_ms : c->timeout_ms, r;
	uint64_t until = clock_ns() + (uint64_t)ms * 1000000u;

	client_turn(c, false); /* only a turn detects the end of a session */
	while ((r = run_begin(run, call, error_p)) == -KVD_E_LOST && clock_ns() < until) {
		if (!client_turns(c))
			return r;
		if (!c->kvd) {
			*error_p = client_gone;
			return r;
		}
	}
	return r;
}

/* There is nothing to wait for, so the GIL is kept. */
static int run_posted(const struct run *run)
{
	static const struct kvd_call posted = {.post = true};
	struct kvd_error error;
	int r;

	if (run->told && run->told != Py_None) {
		PyErr_SetString(PyExc_ValueError,
				"on_done: a posted call has no answer to wait for");
		return -1;
	}
	if (!client_lock(run->client))
		return -1;
	r = run_begin(run, &posted, &error);
	client_unlock(run->client);
	if (r >= 0)
		return 0;
	ext_raise(&error);
	return -1;
}

/* Until it is done; with the lock and the GIL. false: an exception of a signal's handler,
 * and the op is freed at its end. */
static bool op_wait(struct client *c, struct op *op)
{
	while (!op->done) {
		if (client_turns(c))
			continue;
		op->abandoned = !op->done;
		if (op->done)
			op_free(op);
		return false;
	}
	return true;
}

int client_run(const struct run *run, char **json_p)
{
	struct kvd_call call = {.timeout_ms = run->timeout_ms};
	bool told = run->told && run->told != Py_None;
	struct client *c = run->client;
	struct op *op;
	int r;

	if (run->post)
		return run_posted(run);
	op = mem_zalloc(sizeof(*op));
	if (!op) {
		PyErr_NoMemory();
		return -1;
	}
	if (!client_lock(c)) {
		mem_free(op);
		return -1;
	}
	op_init(op, c, &call);
	op->want_json = json_p || told;
	r = told ? run_begin(run, &call, &op->error)
		 : run_begin_waiting(run, &call, &op->error);
	if (r >= 0 && told) {
		Py_INCREF(run->told);
		op->callback = run->told;
	}
	if (r)
		list_remove(&op->link);
	if (r > 0)
		op_end(op, 0, NULL);
	if (r >= 0 && (told || !op_wait(c, op))) {
		client_unlock(c);
		return told ? 0 : -1;
	}
	client_unlock(c);
	if (r >= 0)
		r = op->result;
	if (r < 0 && !PyErr_Occurred())
		ext_raise(&op->error);
	if (r >= 0 && json_p) {
		*json_p = op->json;
		op->json = NULL;
	}
	op_free(op);
	return r < 0 ? -1 : 0;
}

/* ---- handles ----------------------------------------------------------------------- */

struct handle *handle_new(PyTypeObject *type, struct client *c, const char *noun,
			  PyObject *keep)
{
	struct handle *h = ext_new(type, c);

	if (!h)
		return NULL;
	h->noun = noun;
	Py_XINCREF(keep);
	h->keep = keep;
	return h;
}

PyObject *handle_made(struct handle *h, void *made, int r)
{
	h->kvd = made;
	if (r >= 0)
		return (PyObject *)h;
	Py_DECREF(h);
	return NULL;
}

bool handle_usable(const struct handle *h)
{
	struct kvd_error error;

	if (handle_is_open(h))
		return true;
	closed_error(h, &error);
	ext_raise(&error);
	return false;
}

bool handle_lock(const struct handle *h)
{
	if (!handle_usable(h) || !client_lock(h->client))
		return false;
	if (h->kvd)
		return true;
	client_unlock(h->client);
	return handle_usable(h);
}

struct close_start {
	struct handle *of;
	handle_shut *shut;
	PyObject *drop; /* of one that is posted */
};

static void close_ended(struct op *op)
{
	struct handle *h = op->arg;

	h->closing = NULL;
	if (op->result < 0) {
		h->kvd = h->client->kvd ? op->handle : NULL;
		return;
	}
	op->drop = h->keep;
	h->keep = NULL;
}

static int close_begin(void *ctx, const struct kvd_call *call)
{
	struct close_start *s = ctx;
	struct handle *h = s->of;
	struct op *op = call->arg; /* NULL: posted */
	void *kvd = h->kvd;
	int r;

	if (h->closing) {
		list_remove(&op->link);
		op->also = h->closing->also;
		h->closing->also = op;
		return 0;
	}
	if (!kvd)
		return 1;
	h->kvd = NULL;
	r = s->shut(kvd, call);
	if (r < 0) {
		h->kvd = kvd;
		return r;
	}
	if (!op) {
		s->drop = h->keep;
		h->keep = NULL;
		return 0;
	}
	h->closing = op;
	op->end = close_ended;
	op->arg = h;
	op->handle = kvd;
	Py_INCREF(h);
	op->keep = (PyObject *)h;
	return 0;
}

PyObject *handle_close(PyObject *self, PyObject *args, PyObject *kwargs,
		       handle_shut *shut, bool post)
{
	static char *names[] = {"timeout", "on_done", NULL};
	struct handle *h = (struct handle *)self;
	struct close_start s = {.of = h, .shut = shut};
	struct run run = {
		.client = h->client, .start = close_begin, .ctx = &s, .post = post};
	int r;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&O", names, ext_timeout,
					 &run.timeout_ms, &run.told))
		return NULL;
	if (!h->client || (!h->client->kvd && (!run.told || run.told == Py_None)))
		Py_RETURN_NONE; /* it ends with the client */
	r = client_run(&run, NULL);
	Py_XDECREF(s.drop);
	if (r < 0)
		return NULL;
	Py_RETURN_NONE;
}

void handle_dealloc(PyObject *self, handle_shut *shut)
{
	struct handle *h = (struct handle *)self;

	if (handle_is_open(h))
		client_close_later(h->client, shut, h->kvd, h->keep);
	else
		Py_XDECREF(h->keep);
	ext_free(self);
}
