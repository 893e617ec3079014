/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attends: seats (buffers) for query rows, and requests that use them.
 *
 * The seats' memory is Python's (kvd/attend.py), which reads and writes it as arrays. A
 * post never waits, so it keeps the GIL; waiting for one releases it.
 */
#include "python/src/ext.h"

#include "lib/kvd_attend.h"

#define PARTS_MAX 64

static PyTypeObject *attend_type;

struct attend_object {
	struct handle h; /* keep: the region */
	uint32_t heads;
};

struct attend_start {
	struct client *c;
	struct kvd_attend_args args;
	struct kvd_attend *made;
};

static int attend_shut(void *handle, const struct kvd_call *call)
{
	return kvd_attend_close(handle, call);
}

static void attend_dealloc(PyObject *self)
{
	handle_dealloc(self, attend_shut);
}

static int attend_begin(void *ctx, const struct kvd_call *call)
{
	struct attend_start *s = ctx;

	return kvd_attend_open(s->c->kvd, &s->args, call, &s->made);
}

/* rope: None or (first, dims, pairs, inv_freq as bytes of doubles) */
bool ext_rope_parse(PyObject *rope, struct kvd_rope *out)
{
	const char *freq;
	Py_ssize_t bytes;
	int pairs;

	if (rope == Py_None)
		return true;
	if (!PyArg_ParseTuple(rope, "IIiy#", &out->first, &out->dims, &pairs, &freq,
			      &bytes))
		return false;
	if ((uint64_t)bytes != out->dims / 2 * sizeof(double)) {
		PyErr_SetString(PyExc_ValueError,
				"rope.inv_freq: needs dims / 2 numbers");
		return false;
	}
	out->pairs = (enum kvd_rope_pairs)pairs;
	out->inv_freq = (const double *)(const void *)freq;
	return true;
}

/* Attend(client, region, offset, address, rows, seats, kind, q_type, kv_type, heads,
 * kv_heads, first_head, dqk, dv, scale, softcap, view, key, value, key_scale,
 * value_scale, rope, out_bf16, timeout) */
static PyObject *attend_make(PyTypeObject *type, PyObject *args,
			     PyObject *Py_UNUSED(kwargs))
{
	PyObject *client, *region, *rope;
	struct attend_start s = {0};
	struct kvd_attend_args *a = &s.args;
	struct use use = {.to = &a->region};
	struct run run = {.start = attend_begin, .ctx = &s, .uses = &use, .use_count = 1};
	struct attend_object *object;
	unsigned long long offset, address;
	int kind, q_type, kv_type, out_bf16, r;

	if (!PyArg_ParseTuple(args, "O!O!KKIIiiiIIIIIffzzzzzOpO&", client_type, &client,
			      region_type, &region, &offset, &address, &a->rows,
			      &a->seats, &kind, &q_type, &kv_type, &a->heads,
			      &a->kv_heads, &a->first_head, &a->dqk, &a->dv, &a->scale,
			      &a->softcap, &a->view, &a->key, &a->value, &a->key_scale,
			      &a->value_scale, &rope, &out_bf16, ext_timeout,
			      &run.timeout_ms) ||
	    !ext_rope_parse(rope, &a->rope) ||
	    !region_usable((struct region *)region, (struct client *)client, "region", 0))
		return NULL;
	use.of = (struct handle *)region;
	a->offset = offset;
	a->address = (void *)(uintptr_t)address;
	a->out_bf16 = out_bf16;
	a->kind = (enum kvd_attend_kind)kind;
	a->q_type = (enum kvd_value_type)q_type;
	a->kv_type = (enum kvd_value_type)kv_type;
	s.c = run.client = (struct client *)client;
	object = (struct attend_object *)handle_new(type, s.c, "attend", region);
	if (!object)
		return NULL;
	object->heads = a->heads;
	r = client_run(&run, NULL);
	return handle_made(&object->h, s.made, r);
}

/* (bytes, q, o, m, l, ready, done) of a seat */
static PyObject *attend_seat(PyObject *self, PyObject *Py_UNUSED(none))
{
	struct handle *object = (struct handle *)self;
	struct kvd_seat seat;

	if (!handle_usable(object))
		return NULL;
	if (kvd_attend_seat(object->kvd, &seat) < 0)
		return ext_raise_code(KVD_E_STATE, "attend: no answer so far");
	return Py_BuildValue("(KKKKKKK)", (unsigned long long)seat.bytes,
			     (unsigned long long)seat.q, (unsigned long long)seat.o,
			     (unsigned long long)seat.m, (unsigned long long)seat.l,
			     (unsigned long long)seat.ready,
			     (unsigned long long)seat.done);
}

/* (hold, row, rows, first, count, tokens, delta, per_token, select as bytes or None) */
static bool part_parse(const struct attend_object *object, PyObject *tuple,
		       struct kvd_part *part, struct use *use_p)
{
	unsigned long long tokens;
	const char *select;
	Py_ssize_t bytes;
	PyObject *hold;

	if (!PyArg_ParseTuple(tuple, "OIIIIKiIz#", &hold, &part->row, &part->rows,
			      &part->first, &part->count, &tokens, &part->delta,
			      &part->per_token, &select, &bytes))
		return false;
	if (select && (uint64_t)bytes != (uint64_t)(part->rows / object->heads) *
						 part->per_token * sizeof(uint32_t)) {
		PyErr_SetString(PyExc_ValueError,
				"select: lists of different lengths; give "
				"each query token as many tokens");
		return false;
	}
	part->tokens = tokens;
	part->select = (const uint32_t *)(const void *)select;
	*use_p = (struct use){ext_hold_of(hold, object->h.client), &part->hold};
	return use_p->of != NULL;
}

struct post_start {
	struct kvd_attend *kvd;
	struct kvd_part parts[PARTS_MAX];
	unsigned int seat, layer, deadline_us;
	size_t count;
	bool ordered;
	uint64_t value;
};

static int post_begin(void *ctx, const struct kvd_call *call)
{
	struct post_start *s = ctx;

	(void)call;
	if (s->ordered)
		return kvd_attend_order(s->kvd, s->seat, s->layer, s->parts, s->count,
					s->deadline_us, &s->value);
	return kvd_attend_post(s->kvd, s->seat, s->layer, s->parts, s->count,
			       s->deadline_us);
}

static PyObject *post_any(PyObject *self, PyObject *args, bool ordered)
{
	struct attend_object *object = (struct attend_object *)self;
	struct use uses[PARTS_MAX + 1];
	struct post_start s = {.ordered = ordered};
	struct run run = {.client = object->h.client,
			  .start = post_begin,
			  .ctx = &s,
			  .uses = uses,
			  .post = true};
	PyObject *tuple;
	Py_ssize_t count;

	if (!PyArg_ParseTuple(args, "IIO!I", &s.seat, &s.layer, &PyTuple_Type, &tuple,
			      &s.deadline_us) ||
	    !handle_usable(&object->h))
		return NULL;
	count = PyTuple_Size(tuple);
	if (count < 1 || count > PARTS_MAX) {
		PyErr_Format(PyExc_ValueError, "parts: %zd (1 to %d)", count, PARTS_MAX);
		return NULL;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		if (!part_parse(object, PyTuple_GetItem(tuple, i), &s.parts[i], &uses[i]))
			return NULL;
	}
	uses[count] = (struct use){&object->h, &s.kvd};
	s.count = (size_t)count;
	run.use_count = s.count + 1;
	if (client_run(&run, NULL) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(s.value);
}

/* post(seat, layer, parts, deadline_us) -> 0 */
static PyObject *attend_post(PyObject *self, PyObject *args)
{
	return post_any(self, args, false);
}

/* order(seat, layer, parts, deadline_us) -> the value of the seat's words */
static PyObject *attend_order(PyObject *self, PyObject *args)
{
	return post_any(self, args, true);
}

static PyObject *attend_state(PyObject *self, PyObject *args)
{
	struct handle *object = (struct handle *)self;
	unsigned int seat;
	int state;

	if (!PyArg_ParseTuple(args, "I", &seat) || !handle_usable(object))
		return NULL;
	state = kvd_attend_state(object->kvd, seat);
	return state < 0 ? ext_raise_code(-state, "seat %u", seat)
			 : PyLong_FromLong(state);
}

/* wait(seat, timeout) -> state */
static PyObject *attend_wait(PyObject *self, PyObject *args)
{
	struct handle *object = (struct handle *)self;
	unsigned int seat;
	int ms, state;

	if (!PyArg_ParseTuple(args, "IO&", &seat, ext_timeout, &ms) ||
	    !handle_lock(object))
		return NULL;
	Py_BEGIN_ALLOW_THREADS state = kvd_attend_wait(object->kvd, seat, ms);
	Py_END_ALLOW_THREADS client_unlock(object->client);
	if (state >= 0)
		return PyLong_FromLong(state);
	return ext_raise_code(-state,
			      state == -KVD_E_NOREPLY ? "seat %u: no result in time"
						      : "seat %u: no request",
			      seat);
}

/* (queue_us, attend_us, daemons, together, replicate, error, retryable) */
static PyObject *attend_read(PyObject *self, PyObject *args)
{
	struct handle *object = (struct handle *)self;
	struct kvd_attend_facts facts;
	unsigned int seat;

	if (!PyArg_ParseTuple(args, "I", &seat) || !handle_usable(object))
		return NULL;
	if (kvd_attend_read(object->kvd, seat, &facts) < 0)
		return ext_raise_code(KVD_E_STATE, "seat %u: no request", seat);
	return Py_BuildValue("(KKIINiN)", (unsigned long long)facts.queue_us,
			     (unsigned long long)facts.attend_us, facts.daemons,
			     facts.together, PyBool_FromLong(facts.replicate),
			     facts.error, PyBool_FromLong(facts.retryable));
}

/* error(seat, timeout) -> None or (code, name, retryable, scope, message) */
static PyObject *attend_error(PyObject *self, PyObject *args)
{
	struct handle *object = (struct handle *)self;
	struct kvd_error error;
	unsigned int seat;
	int ms, r;

	if (!PyArg_ParseTuple(args, "IO&", &seat, ext_timeout, &ms) ||
	    !handle_lock(object))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = kvd_attend_error(object->kvd, seat, ms, &error);
	Py_END_ALLOW_THREADS client_unlock(object->client);
	return ext_error(r < 0 ? NULL : &error);
}

static PyObject *attend_stop(PyObject *self, PyObject *args)
{
	struct handle *object = (struct handle *)self;
	unsigned int seat;

	if (!PyArg_ParseTuple(args, "I", &seat) || !handle_lock(object))
		return NULL;
	if (kvd_attend_stop(object->kvd, seat) < 0)
		return client_raise(object->client);
	client_unlock(object->client);
	Py_RETURN_NONE;
}

static PyObject *attend_close(PyObject *self, PyObject *args)
{
	return handle_close(self, args, NULL, attend_shut, false);
}

static PyMethodDef attend_methods[] = {
	{"seat", attend_seat, METH_NOARGS, NULL},
	{"post", attend_post, METH_VARARGS, NULL},
	{"order", attend_order, METH_VARARGS, NULL},
	{"state", attend_state, METH_VARARGS, NULL},
	{"wait", attend_wait, METH_VARARGS, NULL},
	{"read", attend_read, METH_VARARGS, NULL},
	{"error", attend_error, METH_VARARGS, NULL},
	{"stop", attend_stop, METH_VARARGS, NULL},
	{"close", attend_close, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};
static PyType_Slot attend_slots[] = {
	{Py_tp_new, (void *)attend_make},
	{Py_tp_dealloc, (void *)attend_dealloc},
	{Py_tp_methods, attend_methods},
	{0, NULL},
};

int ext_attend_init(PyObject *module)
{
	attend_type = ext_type(module, "kvd._kvd.Attend", sizeof(struct attend_object),
			       attend_slots);
	return attend_type ? 0 : -1;
}
