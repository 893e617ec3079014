/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Picks and scaling: kvd_picker and kvd_scale_step(). Words and limits of arguments are
 * in kvd/pick.py, which is the caller.
 *
 * A picker is a capsule. Its calls are arithmetic and keep the GIL, which is its lock.
 * Times are nanoseconds; a load is a tuple in the order of struct kvd_pick_load, a
 * scale's state bytes.
 */
#include "python/src/ext.h"

#include <string.h>

#include "lib/kvd_pick.h"

#define PICKER "kvd.pick.picker"

static void picker_drop(PyObject *capsule)
{
	kvd_picker_free(PyCapsule_GetPointer(capsule, PICKER));
}

static struct kvd_picker *picker_of(PyObject *capsule)
{
	return PyCapsule_GetPointer(capsule, PICKER);
}

/* (seed, token_bytes, stale_s, hold_s, lag_s, scan, sample, results) */
static PyObject *pick_new(PyObject *module, PyObject *args)
{
	struct kvd_pick_options o = {.seed = 0};
	unsigned long long seed;
	struct kvd_picker *picker;
	PyObject *capsule;
	int results, code;

	(void)module;
	if (!PyArg_ParseTuple(args, "KddddIIp", &seed, &o.token_bytes, &o.stale_s,
			      &o.hold_s, &o.lag_s, &o.scan, &o.sample, &results))
		return NULL;
	o.seed = seed;
	o.results = results;
	code = kvd_picker_new(&o, &picker);
	if (code < 0)
		return ext_raise_code(-code, "an option is beyond its limits");
	capsule = PyCapsule_New(picker, PICKER, picker_drop);
	if (!capsule)
		kvd_picker_free(picker);
	return capsule;
}

static bool load_of(PyObject *tuple, struct kvd_pick_load *load)
{
	unsigned long long seq;

	if (!PyArg_ParseTuple(tuple, "Kdddddddddddd", &seq, &load->rooms_waiting,
			      &load->rooms_running, &load->bytes_queued, &load->gbps,
			      &load->failed, &load->running, &load->waiting,
			      &load->kv_free_tokens, &load->kv_total_tokens,
			      &load->prompt_tokens_waiting, &load->prompt_tokens_s,
			      &load->decode_tokens_s))
		return false;
	load->seq = seq;
	return true;
}

/* (picker, side, worker, state, load or None, sampled_ns, now_ns) */
static PyObject *pick_set(PyObject *module, PyObject *args)
{
	unsigned long long sampled_ns, now_ns;
	struct kvd_pick_load load;
	struct kvd_picker *picker;
	PyObject *capsule, *figures;
	const char *worker;
	int side, state, code;

	(void)module;
	if (!PyArg_ParseTuple(args, "OisiOKK", &capsule, &side, &worker, &state, &figures,
			      &sampled_ns, &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker || (figures != Py_None && !load_of(figures, &load)))
		return NULL;
	code = kvd_picker_set(picker, (enum kvd_pick_side)side, worker,
			      (enum kvd_pick_state)state,
			      figures == Py_None ? NULL : &load, sampled_ns, now_ns);
	if (code == -KVD_E_LIMIT)
		return ext_raise_code(-code, "a group has at most %d workers",
				      KVD_PICK_WORKERS_MAX);
	if (code < 0)
		return ext_raise_code(-code, "worker: a name of 1 to %d bytes",
				      KVD_PICK_NAME_MAX - 1);
	Py_RETURN_NONE;
}

/* (picker, side, text, now_ns) */
static PyObject *pick_feed(PyObject *module, PyObject *args)
{
	unsigned long long now_ns;
	struct kvd_picker *picker;
	PyObject *capsule;
	const char *text;
	Py_ssize_t length;
	int side, code;

	(void)module;
	if (!PyArg_ParseTuple(args, "Ois#K", &capsule, &side, &text, &length, &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker)
		return NULL;
	code = kvd_picker_feed(picker, (enum kvd_pick_side)side, text, (size_t)length,
			       now_ns);
	if (code == -KVD_E_LIMIT)
		return ext_raise_code(-code, "more than %d workers, or %d ranks of one",
				      KVD_PICK_WORKERS_MAX, KVD_PICK_RANKS_MAX);
	if (code < 0)
		return ext_raise_code(-code, "not an answer of group.query");
	Py_RETURN_NONE;
}

struct words {
	struct kvd_pick_near near[KVD_PICK_NEAR_MAX];
	const char *avoid[KVD_PICK_NEAR_MAX];
};

/* (prompt, bytes, output, near: tuple of (worker, tokens), avoid: tuple of str, only) */
static bool args_of(PyObject *tuple, struct kvd_pick_args *args, struct words *words)
{
	PyObject *near, *avoid;
	int only;

	if (!PyArg_ParseTuple(tuple, "dddO!O!i", &args->prompt_tokens, &args->bytes,
			      &args->output_tokens, &PyTuple_Type, &near, &PyTuple_Type,
			      &avoid, &only))
		return false;
	args->near_count = (size_t)PyTuple_Size(near);
	args->avoid_count = (size_t)PyTuple_Size(avoid);
	if (args->near_count > KVD_PICK_NEAR_MAX ||
	    args->avoid_count > KVD_PICK_NEAR_MAX) {
		PyErr_Format(PyExc_ValueError, "near, avoid: at most %d workers",
			     KVD_PICK_NEAR_MAX);
		return false;
	}
	for (size_t i = 0; i < args->near_count; i++)
		if (!PyArg_ParseTuple(PyTuple_GetItem(near, (Py_ssize_t)i), "sd",
				      &words->near[i].worker, &words->near[i].tokens))
			return false;
	for (size_t i = 0; i < args->avoid_count; i++)
		if (!PyArg_Parse(PyTuple_GetItem(avoid, (Py_ssize_t)i), "s",
				 &words->avoid[i]))
			return false;
	args->near = words->near;
	args->avoid = words->avoid;
	args->only_prefill = only == KVD_PICK_PREFILL;
	args->only_decode = only == KVD_PICK_DECODE;
	return true;
}

static PyObject *score_of(const struct kvd_pick_score *s)
{
	return Py_BuildValue("dddddOO", s->total_s, s->queue_s, s->compute_s,
			     s->transfer_s, s->penalty_s,
			     s->last_resort ? Py_True : Py_False,
			     s->fresh ? Py_True : Py_False);
}

/* (picker, args, now_ns) -> (id, prefill, decode, score, score) */
static PyObject *pick_pick(PyObject *module, PyObject *args)
{
	struct kvd_pick_args a = {.near = NULL};
	struct kvd_pick_result r;
	unsigned long long now_ns;
	struct kvd_picker *picker;
	PyObject *capsule, *tuple;
	struct words words;
	int code;

	(void)module;
	if (!PyArg_ParseTuple(args, "OO!K", &capsule, &PyTuple_Type, &tuple, &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker || !args_of(tuple, &a, &words))
		return NULL;
	code = kvd_pick(picker, &a, now_ns, &r);
	if (code == -KVD_E_NOTFOUND)
		return ext_raise_code(
			-code, "no %s worker serves, but for those to avoid",
			!a.only_decode && !*r.worker[KVD_PICK_PREFILL] ? "prefill"
								       : "decode");
	if (code == -KVD_E_LIMIT)
		return ext_raise_code(-code, "%d picks are not released",
				      KVD_PICK_HELD_MAX);
	if (code < 0)
		return ext_raise_code(-code, "an amount or a name is beyond its limits");
	return Py_BuildValue("KssNN", (unsigned long long)r.id,
			     r.worker[KVD_PICK_PREFILL], r.worker[KVD_PICK_DECODE],
			     score_of(&r.score[KVD_PICK_PREFILL]),
			     score_of(&r.score[KVD_PICK_DECODE]));
}

/* (picker, side, args, now_ns) -> [(worker, state, score)] */
static PyObject *pick_scores(PyObject *module, PyObject *args)
{
	struct kvd_pick_args a = {.near = NULL};
	unsigned long long now_ns;
	PyObject *capsule, *tuple, *list;
	struct kvd_picker *picker;
	struct words words;
	size_t all = 0;
	int side;

	(void)module;
	if (!PyArg_ParseTuple(args, "OiO!K", &capsule, &side, &PyTuple_Type, &tuple,
			      &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker || !args_of(tuple, &a, &words))
		return NULL;
	kvd_picker_count(picker, (enum kvd_pick_side)side, &all);
	list = PyList_New((Py_ssize_t)all);
	for (size_t i = 0; list && i < all; i++) {
		char worker[KVD_PICK_NAME_MAX];
		struct kvd_pick_score score;
		enum kvd_pick_state state;
		int code = kvd_picker_score(picker, (enum kvd_pick_side)side, i, &a,
					    now_ns, worker, &state, &score);
		PyObject *row =
			code ? NULL
			     : Py_BuildValue("siN", worker, (int)state, score_of(&score));

		if (code)
			ext_raise_code(-code, "an amount or a name is beyond its limits");
		if (!row || PyList_SetItem(list, (Py_ssize_t)i, row) < 0) {
			Py_DECREF(list);
			return NULL;
		}
	}
	return list;
}

/* (picker, id, ttft_s, failed, now_ns) */
static PyObject *pick_settle(PyObject *module, PyObject *args)
{
	unsigned long long id, now_ns;
	struct kvd_picker *picker;
	unsigned int failed;
	PyObject *capsule;
	double ttft_s;

	(void)module;
	if (!PyArg_ParseTuple(args, "OKdIK", &capsule, &id, &ttft_s, &failed, &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker)
		return NULL;
	kvd_pick_settle(picker, id, ttft_s, failed, now_ns);
	Py_RETURN_NONE;
}

/* (picker, id, now_ns) */
static PyObject *pick_release(PyObject *module, PyObject *args)
{
	unsigned long long id, now_ns;
	struct kvd_picker *picker;
	PyObject *capsule;

	(void)module;
	if (!PyArg_ParseTuple(args, "OKK", &capsule, &id, &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker)
		return NULL;
	kvd_pick_release(picker, id, now_ns);
	Py_RETURN_NONE;
}

/* (picker, side) -> (serving, all) */
static PyObject *pick_count(PyObject *module, PyObject *args)
{
	struct kvd_picker *picker;
	PyObject *capsule;
	size_t serving, all = 0;
	int side;

	(void)module;
	if (!PyArg_ParseTuple(args, "Oi", &capsule, &side))
		return NULL;
	picker = picker_of(capsule);
	if (!picker)
		return NULL;
	serving = kvd_picker_count(picker, (enum kvd_pick_side)side, &all);
	return Py_BuildValue("nn", (Py_ssize_t)serving, (Py_ssize_t)all);
}

/* ---- scaling ---- */

/* (picker, now_ns) -> two of (workers, speed, served, waiting) */
static PyObject *scale_measure(PyObject *module, PyObject *args)
{
	struct kvd_scale_sample s;
	unsigned long long now_ns;
	struct kvd_picker *picker;
	PyObject *capsule;

	(void)module;
	if (!PyArg_ParseTuple(args, "OK", &capsule, &now_ns))
		return NULL;
	picker = picker_of(capsule);
	if (!picker)
		return NULL;
	kvd_scale_measure(picker, now_ns, &s);
	return Py_BuildValue("(Iddd)(Iddd)", s.side[0].workers, s.side[0].speed,
			     s.side[0].served, s.side[0].waiting, s.side[1].workers,
			     s.side[1].speed, s.side[1].served, s.side[1].waiting);
}

/* (state, (min, max, min, max, seven numbers), two samples, now_ns)
 * -> (state, workers, workers, need, need, known, known, changed) */
static PyObject *scale_step(PyObject *module, PyObject *args)
{
	struct kvd_scale_options o = {.band = 0};
	struct kvd_scale_sample s = {.side[0].workers = 0};
	struct kvd_scale_state state = {.side[0].wanted = 0};
	struct kvd_scale_wanted w;
	unsigned long long now_ns;
	const char *before;
	Py_ssize_t length;
	int code;

	(void)module;
	if (!PyArg_ParseTuple(args, "y#(IIIIddddddd)(Iddd)(Iddd)K", &before, &length,
			      &o.min[0], &o.max[0], &o.min[1], &o.max[1], &o.prefill_busy,
			      &o.decode_full, &o.wait_s, &o.start_s, &o.up_s, &o.down_s,
			      &o.band, &s.side[0].workers, &s.side[0].speed,
			      &s.side[0].served, &s.side[0].waiting, &s.side[1].workers,
			      &s.side[1].speed, &s.side[1].served, &s.side[1].waiting,
			      &now_ns))
		return NULL;
	if (length == (Py_ssize_t)sizeof(state))
		memcpy(&state, before, sizeof(state));
	code = kvd_scale_step(&state, &o, &s, now_ns, &w);
	if (code < 0)
		return ext_raise_code(-code, "an option is beyond its limits");
	return Py_BuildValue("y#IIddOOO", (const char *)&state, (Py_ssize_t)sizeof(state),
			     w.workers[0], w.workers[1], w.need[0], w.need[1],
			     w.known[0] ? Py_True : Py_False,
			     w.known[1] ? Py_True : Py_False,
			     w.changed ? Py_True : Py_False);
}

static PyMethodDef functions[] = {
	{"pick_new", pick_new, METH_VARARGS, NULL},
	{"pick_set", pick_set, METH_VARARGS, NULL},
	{"pick_feed", pick_feed, METH_VARARGS, NULL},
	{"pick_pick", pick_pick, METH_VARARGS, NULL},
	{"pick_scores", pick_scores, METH_VARARGS, NULL},
	{"pick_settle", pick_settle, METH_VARARGS, NULL},
	{"pick_release", pick_release, METH_VARARGS, NULL},
	{"pick_count", pick_count, METH_VARARGS, NULL},
	{"scale_measure", scale_measure, METH_VARARGS, NULL},
	{"scale_step", scale_step, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_pick_init(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
