/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Route, fetch or local: kvd_decide() and pages of constants. Texts and limits of
 * arguments are in kvd/cost.py, which is the caller.
 *
 * A page is a capsule: mapped memory that its own finaliser unmaps, without a reference
 * to the client it is from, so it outlives that. A decision is arithmetic and keeps the
 * GIL.
 */
#include "python/src/ext.h"

#include <string.h>

#define PAGE "kvd.cost.page"

static void page_drop(PyObject *capsule)
{
	kvd_cost_close(PyCapsule_GetPointer(capsule, PAGE));
}

static PyObject *capsule_of(struct kvd_cost_page *page)
{
	PyObject *capsule = PyCapsule_New(page, PAGE, page_drop);

	if (!capsule)
		kvd_cost_close(page);
	return capsule;
}

static PyObject *cost_preset(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct kvd_cost_page *page;
	const char *name;
	int code;

	if (!PyArg_ParseTuple(args, "s", &name))
		return NULL;
	code = kvd_cost_preset(name, &page);
	if (code < 0)
		return ext_raise_code(-code, "no fabric \"%s\"", name);
	return capsule_of(page);
}

struct page_start {
	struct client *client;
	struct kvd_cost_page *page;
};

static int page_begin(void *ctx, const struct kvd_call *call)
{
	struct page_start *s = ctx;

	return kvd_cost_open(s->client->kvd, call, &s->page);
}

/* (client, timeout) */
static PyObject *cost_open(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *client, *capsule;
	struct page_start s = {NULL};
	struct run run = {.start = page_begin, .ctx = &s};

	if (!PyArg_ParseTuple(args, "O!O&", client_type, &client, ext_timeout,
			      &run.timeout_ms))
		return NULL;
	s.client = run.client = (struct client *)client;
	if (client_run(&run, NULL) < 0)
		return NULL;
	capsule = PyCapsule_New(s.page, PAGE, page_drop);
	if (!capsule)
		kvd_cost_close(s.page);
	return capsule;
}

/* Tuples of (peer, tokens, selected, gpu). */
static int holders_of(PyObject *list, struct kvd_cost_holder *holders, size_t *count_p)
{
	Py_ssize_t count = PyTuple_Size(list);

	if (count < 1 || count > KVD_COST_HOLDERS_MAX) {
		PyErr_Format(PyExc_ValueError, "holders: %zd (1 to %d)", count,
			     KVD_COST_HOLDERS_MAX);
		return -1;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		unsigned long long tokens, selected;
		const char *peer;
		Py_ssize_t length;
		int gpu;

		if (!PyArg_ParseTuple(PyTuple_GetItem(list, i), "y#KKp", &peer, &length,
				      &tokens, &selected, &gpu))
			return -1;
		if (length != sizeof(holders[i].peer)) {
			PyErr_Format(PyExc_ValueError,
				     "holders[%zd]: a peer has 16 bytes", i);
			return -1;
		}
		memcpy(holders[i].peer, peer, sizeof(holders[i].peer));
		holders[i].tokens = tokens;
		holders[i].selected = selected;
		holders[i].gpu = gpu;
	}
	*count_p = (size_t)count;
	return 0;
}

static PyObject *result_of(const struct kvd_decide_result *r)
{
	return Py_BuildValue(
		"iOO(dd)(dd)(dd)(dd)(dd)(dd)dns", (int)r->way,
		r->sure ? Py_True : Py_False, r->replicate ? Py_True : Py_False,
		r->route.us, r->route.error_us, r->fetch.us, r->fetch.error_us,
		r->local.us, r->local.error_us, r->round.us, r->round.error_us,
		r->attend.us, r->attend.error_us, r->once.us, r->once.error_us,
		r->even_steps, (Py_ssize_t)r->slowest, r->transport);
}

/* (page, kind, numbers of 32 bits, three flags, last, three times, holders) */
static PyObject *decide(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct kvd_cost_holder holders[KVD_COST_HOLDERS_MAX] = {0};
	struct kvd_decide_args a = {.holders = holders};
	struct kvd_decide_result result;
	struct kvd_cost_page *page;
	PyObject *capsule, *list;
	int kind, last, selected, shifted, no_pages, code;

	if (!PyArg_ParseTuple(args, "Oi(IIIIIIIIIII)(ppp)i(ddd)O!", &capsule, &kind,
			      &a.layers, &a.heads, &a.kv_heads, &a.dqk, &a.dv,
			      &a.value_bytes, &a.out_bytes, &a.token_bytes,
			      &a.query_tokens, &a.steps, &a.steps_made, &selected,
			      &shifted, &no_pages, &last, &a.attend_us, &a.hidden_us,
			      &a.recompute_us, &PyTuple_Type, &list))
		return NULL;
	page = PyCapsule_GetPointer(capsule, PAGE);
	if (!page || holders_of(list, holders, &a.holder_count) < 0)
		return NULL;
	a.kind = (enum kvd_cost_kind)kind;
	a.last = (enum kvd_cost_way)last;
	a.selected = selected;
	a.shifted = shifted;
	a.no_pages = no_pages;
	code = kvd_decide(&a, page, &result);
	if (code == -KVD_E_INVAL)
		return ext_raise_code(-code, "an argument is outside its limits");
	if (code < 0)
		return ext_raise_code(-code, code == -KVD_E_BUSY
						     ? "the page is being written"
						     : "no way has a known cost");
	return result_of(&result);
}

static PyMethodDef functions[] = {
	{"cost_preset", cost_preset, METH_VARARGS, NULL},
	{"cost_open", cost_open, METH_VARARGS, NULL},
	{"cost_decide", decide, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_cost_init(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
