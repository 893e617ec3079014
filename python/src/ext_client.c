/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Client: one connection of libkvd, used by any number of Python threads.
 *
 * libkvd supports one thread at a time, and its blocking calls hold it until the
 * answer is received. So none of them is used: every request is started without
 * waiting, under the lock, and its caller waits without the lock. One of the
 * waiting threads polls the socket for all (`polling`), takes a turn, and wakes
 * the others; a thread whose request is done returns, and one of the rest polls.
 * So a frozen daemon costs its caller's time, never another thread's.
 *
 * Finalisers may run at any moment in any thread, also while another one waits
 * for this lock (not under it: no Python code runs there). They push handles to
 * be closed onto a list without a lock; the next thread that has the lock sends
 * the request, and the one after the answer drops the references that had to be
 * kept until then (memory that the daemon may have written).
 */
#include "daemon/base/clock.h"
#include "python/src/ext.h"

#include <poll.h>
#include <string.h>
#include <time.h>

#define TIMEOUT_MS 10000 /* as libkvd's */
#define TURN_EVERY_NS UINT64_C(50000000)
#define POLL_MS_MAX 50
#define FLUSH_NS UINT64_C(1000000000)

PyTypeObject *client_type;

/* ---- the lock ------------------------------------------------------------------ */

static bool client_usable(struct client *c)
{
	if (c->forks != ext_forks()) {
		ext_raise_code(KVD_E_FORKED, "this client belongs to the parent process: "
					     "open a new one after fork()");
		return false;
	}
	if (!c->kvd) {
		ext_raise_code(KVD_E_STATE, "the client is closed");
		return false;
	}
	return true;
}

bool client_lock(struct client *c)
{
	if (!client_usable(c))
		return false;
	if (pthread_mutex_trylock(&c->lock) != 0) {
		Py_BEGIN_ALLOW_THREADS pthread_mutex_lock(&c->lock);
		Py_END_ALLOW_THREADS
	}
	if (c->kvd)
		return true;
	pthread_mutex_unlock(&c->lock);
	return client_usable(c);
}

bool client_trylock(struct client *c)
{
	if (c->forks != ext_forks() || !c->kvd || pthread_mutex_trylock(&c->lock) != 0)
		return false;
	if (c->kvd)
		return true;
	pthread_mutex_unlock(&c->lock);
	return false;
}

/* ---- work left by finalisers ---------------------------------------------------- */

static void on_closed(void *arg, int result, const struct kvd_reply *reply)
{
	struct closing *g = arg;

	(void)reply;
	g->asked = false;
	g->closed = result == 0;
	g->again = !g->closed;
}

static void closings_run(struct client *c)
{
	struct closing *g = atomic_exchange(&c->left, NULL), **at;

	while (g) {
		struct closing *next = g->next;

		g->next = c->closings;
		c->closings = g;
		g = next;
	}
	for (at = &c->closings; (g = *at);) {
		struct kvd_call call = {.on_done = on_closed, .arg = g};

		if (!g->asked && !g->closed && !g->again) {
			int r;

			g->asked = true;
			r = g->close(g->handle, &call);
			g->closed = r > 0;
			g->again = r < 0;
			g->asked = r == 0;
		}
		if (g->closed) {
			*at = g->next;
			g->next = c->closed_list;
			c->closed_list = g;
		} else {
			at = &g->next;
		}
	}
}

/* Has the daemon ended? Shared memory shows that only after a missed heartbeat. */
void client_look(struct client *c)
{
	if (!client_trylock(c))
		return; /* the thread that has it takes turns */
	client_turn(c, false);
	client_unlock(c);
}

void client_turn(struct client *c, bool now)
{
	uint64_t t = clock_ns();
	bool late = t - c->polled_ns > TURN_EVERY_NS;

	if (!now && !late)
		return;
	kvd_poll(c->kvd, 0);
	c->polled_ns = t;
	if (t - c->tended_ns > TURN_EVERY_NS) { /* retry what was refused */
		c->tended_ns = t;
		for (struct closing *g = c->closings; g; g = g->next)
			g->again = false;
	}
	if (c->closings)
		closings_run(c);
	pthread_cond_broadcast(&c->turned);
}

void client_close_later(struct client *c, int (*close)(void *, const struct kvd_call *),
			void *handle, PyObject *keep)
{
	struct closing *g = mem_zalloc(sizeof(*g));

	if (!g) { /* libkvd's own end of the client frees the handle */
		return;
	}
	g->close = close;
	g->handle = handle;
	g->keep = keep;
	g->next = atomic_load(&c->left);
	while (!atomic_compare_exchange_weak(&c->left, &g->next, g))
		;
	if (client_trylock(c))
		client_unlock(c);
}

/* Work that was queued under the lock: callbacks, and references to drop. */
static void unlocked_run(struct op *told, struct closing *g)
{
	PyObject *kind, *error, *trace; /* of the call that ends with this */

	PyErr_Fetch(&kind, &error, &trace);
	while (told) {
		struct op *next = told->next;

		op_tell(told);
		told = next;
	}
	while (g) {
		struct closing *next = g->next;

		Py_XDECREF(g->keep);
		mem_free(g);
		g = next;
	}
	PyErr_Restore(kind, error, trace);
}

void client_unlock(struct client *c)
{
	struct op *told;
	struct closing *g;

	if (atomic_load_explicit(&c->left, memory_order_relaxed) && c->kvd)
		closings_run(c);
	told = c->told;
	c->told = NULL;
	c->told_end = &c->told;
	g = c->closed_list;
	c->closed_list = NULL;
	pthread_mutex_unlock(&c->lock);
	if (told || g)
		unlocked_run(told, g);
}

PyObject *client_raise(struct client *c)
{
	struct kvd_error copy = *kvd_last_error(c->kvd);

	client_unlock(c);
	return ext_raise(&copy);
}

bool client_end(struct client *c, int r)
{
	if (r < 0)
		client_raise(c);
	else
		client_unlock(c);
	return r >= 0;
}

/* ---- waiting ---------------------------------------------------------------------- */

/* poll() for all waiting threads. The lock is held before and after. */
static void turn_wait(struct client *c)
{
	struct pollfd p = {.fd = kvd_fd(c->kvd), .events = kvd_events(c->kvd)};
	int ms = kvd_timeout_ms(c->kvd);

	c->polling = true;
	pthread_mutex_unlock(&c->lock);
	if (ms < 0 || ms > POLL_MS_MAX)
		ms = POLL_MS_MAX;
	poll(&p, p.fd >= 0, p.fd >= 0 ? ms : ms < 10 ? ms : 10);
	pthread_mutex_lock(&c->lock);
	c->polling = false;
	if (c->kvd)
		client_turn(c, true);
	pthread_cond_broadcast(&c->turned);
}

static void turn_follow(struct client *c)
{
	const struct timespec until = clock_after(POLL_MS_MAX * UINT64_C(1000000));

	pthread_cond_clockwait(&c->turned, &c->lock, CLOCK_MONOTONIC, &until);
}

bool client_turns(struct client *c)
{
	bool signalled;

	Py_BEGIN_ALLOW_THREADS if (c->polling) turn_follow(c);
	else turn_wait(c);
	pthread_mutex_unlock(&c->lock);
	Py_END_ALLOW_THREADS signalled = PyErr_CheckSignals() < 0;
	Py_BEGIN_ALLOW_THREADS pthread_mutex_lock(&c->lock);
	Py_END_ALLOW_THREADS return !signalled;
}

void client_step(struct client *c)
{
	Py_BEGIN_ALLOW_THREADS if (c->polling) turn_follow(c);
	else turn_wait(c);
	Py_END_ALLOW_THREADS
}

/* Data that the socket did not accept waits for the next turn, and the caller may never
 * call again: wait until it is sent, so a daemon that falls behind slows the caller
 * down. */
void client_flush(struct client *c)
{
	uint64_t until = 0;

	while (c->kvd && kvd_events(c->kvd) & POLLOUT) {
		uint64_t now = clock_ns();

		until = until ? until : now + FLUSH_NS;
		if (now > until)
			return;
		Py_BEGIN_ALLOW_THREADS if (c->polling) turn_follow(c);
		else turn_wait(c);
		Py_END_ALLOW_THREADS
	}
}

/* ---- the type ------------------------------------------------------------------------
 */

static PyObject *client_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"socket", "name", "client", "role", "timeout", NULL};
	struct kvd_options options = {0};
	allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
	struct client *c;
	int r;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zzzzO&", names, &options.socket,
					 &options.name, &options.client, &options.role,
					 ext_timeout, &options.timeout_ms))
		return NULL;
	c = (struct client *)alloc(type, 0);
	if (!c)
		return NULL;
	c->forks = ext_forks();
	c->timeout_ms = options.timeout_ms > 0 ? options.timeout_ms : TIMEOUT_MS;
	c->told_end = &c->told;
	list_init(&c->ops);
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->turned, NULL);
	Py_BEGIN_ALLOW_THREADS r = kvd_open(&options, &c->kvd);
	Py_END_ALLOW_THREADS if (r < 0)
	{
		ext_raise(kvd_last_error(NULL));
		Py_DECREF(c);
		return NULL;
	}
	return (PyObject *)c;
}

static void closings_drop(struct client *c)
{
	struct closing *g = atomic_exchange(&c->left, NULL);
	struct closing *lists[] = {g, c->closings, c->closed_list};

	c->closings = c->closed_list = NULL;
	for (size_t i = 0; i < 3; i++) {
		for (g = lists[i]; g;) {
			struct closing *next = g->next;

			Py_XDECREF(g->keep);
			mem_free(g);
			g = next;
		}
	}
}

/* A thread stopped by the interpreter's end keeps its locks. */
static bool interpreter_ends(void)
{
	PyObject *ask = PySys_GetObject("is_finalizing");
	PyObject *answer = ask ? PyObject_CallObject(ask, NULL) : NULL;
	bool ends = !answer || PyObject_IsTrue(answer) == 1;

	Py_XDECREF(answer);
	PyErr_Clear();
	return ends;
}

static void client_shut(struct client *c)
{
	struct kvd_client *kvd;

	if (!c->kvd)
		return;
	if (c->forks != ext_forks()) { /* another thread may have had the lock */
		kvd = c->kvd;
		c->kvd = NULL;
		kvd_close(kvd);
		return;
	}
	if (pthread_mutex_trylock(&c->lock) != 0) {
		if (interpreter_ends())
			return; /* the end of the process closes the session */
		Py_BEGIN_ALLOW_THREADS pthread_mutex_lock(&c->lock);
		Py_END_ALLOW_THREADS
	}
	kvd = c->kvd; /* NULL: another thread has closed it */
	c->kvd = NULL;
	kvd_close(kvd);
	ops_end(c);
	pthread_cond_broadcast(&c->turned);
	client_unlock(c);
	if (kvd)
		closings_drop(c);
}

static PyObject *client_close(PyObject *self, PyObject *Py_UNUSED(none))
{
	client_shut((struct client *)self);
	Py_RETURN_NONE;
}

static void client_dealloc(PyObject *self)
{
	struct client *c = (struct client *)self;
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	client_shut(c);
	if (c->forks == ext_forks()) {
		pthread_cond_destroy(&c->turned);
		pthread_mutex_destroy(&c->lock);
	}
	release(self);
	Py_DECREF(type);
}

struct command {
	struct client *c;
	const char *cmd, *args;
};

static int command_start(void *ctx, const struct kvd_call *call)
{
	struct command *command = ctx;

	return kvd_submit(command->c->kvd, command->cmd, command->args, call);
}

static PyObject *client_command(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"cmd", "args", "timeout", "on_done", NULL};
	struct command command = {.c = (struct client *)self};
	struct run run = {.client = command.c, .start = command_start, .ctx = &command};
	PyObject *text;
	char *json = NULL;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|zO&O", names, &command.cmd,
					 &command.args, ext_timeout, &run.timeout_ms,
					 &run.told))
		return NULL;
	if (client_run(&run, &json) < 0)
		return NULL;
	if (!json)
		Py_RETURN_NONE;
	text = PyUnicode_DecodeUTF8(json, (Py_ssize_t)strlen(json), "replace");
	mem_free(json);
	return text;
}

static PyObject *client_info(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct client *c = (struct client *)self;
	struct kvd_daemon_info d;

	if (!client_lock(c))
		return NULL;
	d = *kvd_daemon(c->kvd);
	client_unlock(c);
	return Py_BuildValue("{s:s,s:s,s:s,s:s,s:i,s:K,s:K,s:I}", "daemon", d.daemon,
			     "name", d.name, "instance", d.instance, "endpoint",
			     d.endpoint, "pid", d.pid, "session",
			     (unsigned long long)d.session, "epoch",
			     (unsigned long long)d.epoch, "slots", d.slots);
}

static PyObject *client_key(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct client *c = (struct client *)self;
	struct kvd_session_key key;
	int r;

	if (!client_lock(c))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_session_key(c->kvd, 0, &key);
	Py_END_ALLOW_THREADS if (!client_end(c, r)) return NULL;
	return Py_BuildValue("(Ks)", (unsigned long long)key.epoch, key.secret);
}

static PyObject *client_poll(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct client *c = (struct client *)self;

	if (!client_lock(c))
		return NULL;
	client_turn(c, true);
	client_unlock(c);
	Py_RETURN_NONE;
}

/* Create the memory shared with the daemon now, not in the first transfer. */
static PyObject *client_prepare(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct client *c = (struct client *)self;
	int r;

	if (!client_lock(c))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_xfer_prepare(c->kvd);
	Py_END_ALLOW_THREADS if (!client_end(c, r)) return NULL;
	Py_RETURN_NONE;
}

/* (fd, events, milliseconds): what an event loop waits for. */
static PyObject *client_wants(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct client *c = (struct client *)self;
	int fd, events, ms;

	if (!client_lock(c))
		return NULL;
	fd = kvd_fd(c->kvd);
	events = kvd_events(c->kvd);
	ms = kvd_timeout_ms(c->kvd);
	client_unlock(c);
	return Py_BuildValue("(iii)", fd, events, ms);
}

static PyObject *client_lost(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct client *c = (struct client *)self;
	bool lost;

	if (!client_lock(c))
		return NULL;
	lost = kvd_lost(c->kvd);
	client_unlock(c);
	return PyBool_FromLong(lost);
}

/* Id of this session; it changes when the daemon restarts. */
static PyObject *client_epoch(PyObject *self, void *Py_UNUSED(closure))
{
	struct client *c = (struct client *)self;
	uint64_t epoch;

	if (!client_lock(c))
		return NULL;
	epoch = kvd_daemon(c->kvd)->epoch;
	client_unlock(c);
	return PyLong_FromUnsignedLongLong(epoch);
}

static PyObject *client_closed(PyObject *self, void *Py_UNUSED(closure))
{
	return PyBool_FromLong(((struct client *)self)->kvd == NULL);
}

static PyMethodDef methods[] = {
	{"close", client_close, METH_NOARGS, NULL},
	{"command", (PyCFunction)(void (*)(void))client_command,
	 METH_VARARGS | METH_KEYWORDS, NULL},
	{"info", client_info, METH_NOARGS, NULL},
	{"key", client_key, METH_NOARGS, NULL},
	{"poll", client_poll, METH_NOARGS, NULL},
	{"prepare", client_prepare, METH_NOARGS, NULL},
	{"wants", client_wants, METH_NOARGS, NULL},
	{"lost", client_lost, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
	{"closed", client_closed, NULL, NULL, NULL},
	{"epoch", client_epoch, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_new, client_make},
	{Py_tp_dealloc, client_dealloc},
	{Py_tp_methods, methods},
	{Py_tp_getset, getset},
	{0, NULL},
};

int ext_client_init(PyObject *module)
{
	client_type = ext_type(module, "kvd._kvd.Client", sizeof(struct client), slots);
	return client_type ? 0 : -1;
}
