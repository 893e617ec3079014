/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention by the daemon's own kernels, in this process (paged.h). Arrays are given as
 * addresses and strides by kvd/math.py, which has checked their types and shapes and
 * keeps them alive; lists of numbers as bytes of native u32. The GIL is released for the
 * computation.
 */
#include "python/src/ext.h"

#include <math.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/math/merge.h"
#include "daemon/math/pick.h"
#include "python/src/paged.h"

/* Numbers as the caller's bytes hold them. */
static bool u32s(const char *bytes, Py_ssize_t length, const uint32_t **list_p,
		 uint32_t *count_p)
{
	if (length % 4 || (uint64_t)length / 4 > UINT32_MAX) {
		PyErr_SetString(PyExc_ValueError, "not a list of u32");
		return false;
	}
	*list_p = (const uint32_t *)(const void *)bytes;
	*count_p = (uint32_t)(length / 4);
	return true;
}

/* (queries, page_counts, pages, ends) */
static bool batch_parse(PyObject *tuple, struct paged *paged)
{
	const char *at[4];
	Py_ssize_t length[4];
	uint32_t counts, ends;

	if (!PyArg_ParseTuple(tuple, "y#y#y#y#", &at[0], &length[0], &at[1], &length[1],
			      &at[2], &length[2], &at[3], &length[3]) ||
	    !u32s(at[0], length[0], &paged->queries, &paged->request_count) ||
	    !u32s(at[1], length[1], &paged->counts, &counts) ||
	    !u32s(at[2], length[2], &paged->table, &paged->table_count) ||
	    !u32s(at[3], length[3], &paged->ends, &ends))
		return false;
	if (counts == paged->request_count && ends == paged->tokens)
		return true;
	PyErr_SetString(PyExc_ValueError, "lists of different lengths");
	return false;
}

/* (kind, type, heads, dqk, dv, pages, tokens of a page, K, V, K's scales, V's), each of
 * the last four as address and strides of a page, a token and a head */
static bool cache_parse(PyObject *tuple, struct paged *paged)
{
	unsigned long long pages, at[4][4];
	struct attend_field *const fields[] = {&paged->k, &paged->v, &paged->k_scale,
					       &paged->v_scale};
	struct attend_shape *shape = &paged->shape;

	if (!PyArg_ParseTuple(tuple, "bbHHHKI(KKKK)(KKKK)(KKKK)(KKKK)", &shape->kind,
			      &shape->kv_type, &shape->kv_heads, &shape->dqk, &shape->dv,
			      &pages, &paged->page_tokens, &at[0][0], &at[0][1],
			      &at[0][2], &at[0][3], &at[1][0], &at[1][1], &at[1][2],
			      &at[1][3], &at[2][0], &at[2][1], &at[2][2], &at[2][3],
			      &at[3][0], &at[3][1], &at[3][2], &at[3][3]))
		return false;
	paged->pages = pages;
	for (size_t i = 0; i < ARRAY_LEN(fields); i++)
		*fields[i] = (struct attend_field){
			.base = (const uint8_t *)(uintptr_t)at[i][0],
			.page_stride = at[i][1],
			.token_stride = at[i][2],
			.head_stride = at[i][3],
		};
	return true;
}

/* (q, type, tokens, heads, stride of a token, o, lse) */
static bool rows_parse(PyObject *tuple, struct paged *paged)
{
	unsigned long long q, stride, o, lse;

	if (!PyArg_ParseTuple(tuple, "KbIHKKK", &q, &paged->shape.q_type, &paged->tokens,
			      &paged->shape.heads, &stride, &o, &lse))
		return false;
	paged->q = (const uint8_t *)(uintptr_t)q;
	paged->q_stride = stride;
	paged->o = (float *)(uintptr_t)o;
	paged->lse = (float *)(uintptr_t)lse;
	return true;
}

static bool isa_parse(const char *name, enum pick_isa *isa_p)
{
	if (pick_by_name(name, isa_p) && pick_has(*isa_p))
		return true;
	PyErr_Format(PyExc_ValueError, "isa: this processor has no \"%.15s\"", name);
	return false;
}

/* (rows, cache, batch, scale, softcap, isa, threads) */
static PyObject *attend(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct paged paged = {.tokens = 0};
	PyObject *rows, *cache, *batch;
	const char *isa;
	bool wrong;
	int r;

	if (!PyArg_ParseTuple(args, "O!O!O!ffsI", &PyTuple_Type, &rows, &PyTuple_Type,
			      &cache, &PyTuple_Type, &batch, &paged.shape.scale,
			      &paged.shape.softcap, &isa, &paged.threads) ||
	    !rows_parse(rows, &paged) || !cache_parse(cache, &paged) ||
	    !batch_parse(batch, &paged) || !isa_parse(isa, &paged.isa))
		return NULL;
	Py_BEGIN_ALLOW_THREADS r = paged_check(&paged);
	wrong = r < 0;
	if (!wrong)
		r = paged_run(&paged);
	Py_END_ALLOW_THREADS if (wrong)
		PyErr_SetString(PyExc_ValueError, err_last()->text);
	else if (r < 0) PyErr_NoMemory();
	else Py_RETURN_NONE;
	return NULL;
}

struct merging {
	float *o, *lse;
	struct merge_part there;
	const uint32_t *at;
	uint32_t count, tokens, heads, dv;
};

/* The part that lse stands for has the sum 1, or none. */
static void merge_row(const struct merging *m, size_t row, size_t there)
{
	float *o = m->o + row * m->dv, *lse = m->lse + row,
	      sum = *lse == -INFINITY ? 0 : 1;
	const struct merge_part parts[2] = {
		{o, lse, &sum},
		{m->there.o + there * m->dv, m->there.m + there, m->there.l + there},
	};

	merge_rows(o, lse, &sum, parts, 2, 1, m->dv);
	*lse = sum == 0 ? -INFINITY : *lse + logf(sum);
}

/* (o, lse, tokens, heads, dv, numbers of query tokens, and there: o, m, l) */
static PyObject *merge(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct merging m;
	unsigned long long at[5];
	const char *numbers;
	Py_ssize_t length;

	if (!PyArg_ParseTuple(args, "KKIIIy#KKK", &at[0], &at[1], &m.tokens, &m.heads,
			      &m.dv, &numbers, &length, &at[2], &at[3], &at[4]) ||
	    !u32s(numbers, length, &m.at, &m.count))
		return NULL;
	m.o = (float *)(uintptr_t)at[0];
	m.lse = (float *)(uintptr_t)at[1];
	m.there = (struct merge_part){(const float *)(uintptr_t)at[2],
				      (const float *)(uintptr_t)at[3],
				      (const float *)(uintptr_t)at[4]};
	for (uint32_t i = 0; i < m.count; i++) {
		if (m.at[i] < m.tokens)
			continue;
		PyErr_Format(PyExc_ValueError, "at[%u]: %u, but o has %u query tokens", i,
			     m.at[i], m.tokens);
		return NULL;
	}
	Py_BEGIN_ALLOW_THREADS for (uint32_t i = 0; i < m.count; i++)
	{
		for (uint32_t h = 0; h < m.heads; h++)
			merge_row(&m, (size_t)m.at[i] * m.heads + h,
				  (size_t)i * m.heads + h);
	}
	Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

/* Names of the kernels that this process can run, the slowest first. */
static PyObject *isas(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
	PyObject *list = PyList_New(0), *tuple, *name;
	int r = 0;

	for (int i = PICK_REF; list && r == 0 && i < PICK_ISAS; i++) {
		if (!pick_has((enum pick_isa)i))
			continue;
		name = PyUnicode_FromString(pick_name((enum pick_isa)i));
		r = name ? PyList_Append(list, name) : -1;
		Py_XDECREF(name);
	}
	tuple = list && r == 0 ? PyList_AsTuple(list) : NULL;
	Py_XDECREF(list);
	return tuple;
}

static PyMethodDef functions[] = {
	{"math_attend", attend, METH_VARARGS, NULL},
	{"math_merge", merge, METH_VARARGS, NULL},
	{"math_isas", isas, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_math_init(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
