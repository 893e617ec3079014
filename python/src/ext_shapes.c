/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts from an engine's own terms, (shapes.h).
 *
 * One call makes a whole layout: shapes(rank, steps) takes a tuple of steps, each a
 * tuple of a shape's name and its numbers in the order of the C struct, and returns the
 * layout's JSON text. Lists of numbers are passed as bytes of native u32, so no Python
 * object is traversed here. Messages are in kvd/shapes.py, which is the caller.
 */
#include "python/src/ext.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "daemon/base/err.h"
#include "python/src/shapes.h"
#include "python/src/shard.h"

#define LAYERS_MAX 65536

/* Numbers as the caller's bytes hold them. */
static int u32s(const char *bytes, Py_ssize_t length, const uint32_t **list_p,
		uint32_t *count_p)
{
	if (length % 4 || length / 4 > LAYERS_MAX) {
		PyErr_SetString(PyExc_ValueError, "not a list of at most 65536 u32");
		return -1;
	}
	*list_p = (const uint32_t *)(const void *)bytes;
	*count_p = (uint32_t)(length / 4);
	return 0;
}

/* 0, or -1 with an exception; negative results of the plan library raise one. */
static int step_end(int r)
{
	if (r >= 0)
		return 0;
	ext_raise_code((int)err_last()->code, "%s", err_last()->text);
	err_clear();
	return -1;
}

static int step_buffer(struct layout *layout, PyObject *step)
{
	unsigned long long bytes;
	const char *name;
	uint32_t index;

	if (!PyArg_ParseTuple(step, "sK", &name, &bytes))
		return -1;
	return step_end(shape_buffer(layout, bytes, &index));
}

static int step_kv(struct layout *layout, PyObject *step, bool mla)
{
	struct shape_sglang_kv kv = {0};
	unsigned long long head_bytes;
	const char *name, *layers;
	Py_ssize_t length;

	if (!PyArg_ParseTuple(step, "ssIIy#IIIK", &name, &kv.view, &kv.page_size,
			      &kv.pages, &layers, &length, &kv.kv_heads, &kv.tp.size,
			      &kv.tp.rank, &head_bytes) ||
	    u32s(layers, length, &kv.layer_ids, &kv.layer_count) < 0)
		return -1;
	kv.head_bytes = head_bytes;
	return step_end(mla ? shape_sglang_mla(layout, &kv)
			    : shape_sglang_mha(layout, &kv));
}

static int step_state(struct layout *layout, PyObject *step)
{
	struct shape_sglang_state state = {0};
	Py_ssize_t length, group_length;
	const char *name, *layers, *groups;
	const uint32_t *group;
	unsigned long long unit_bytes;

	if (!PyArg_ParseTuple(step, "ssIy#Iy#KIII", &name, &state.view, &state.slots,
			      &layers, &length, &state.full_dim, &groups, &group_length,
			      &unit_bytes, &state.outer, &state.tp.size,
			      &state.tp.rank) ||
	    u32s(layers, length, &state.layer_ids, &state.layer_count) < 0 ||
	    u32s(groups, group_length, &group, &state.group_count) < 0)
		return -1;
	if (state.group_count > SHAPE_GROUPS_MAX) {
		PyErr_Format(PyExc_ValueError, "groups: at most %u", SHAPE_GROUPS_MAX);
		return -1;
	}
	memcpy(state.groups, groups, (size_t)group_length);
	state.unit_bytes = unit_bytes;
	return step_end(shape_sglang_state(layout, &state));
}

static int step_aux(struct layout *layout, PyObject *step)
{
	struct shape_sglang_aux aux = {0};
	const char *name;

	if (!PyArg_ParseTuple(step, "ssIIIIII", &name, &aux.view, &aux.slots,
			      &aux.hidden_size, &aux.hidden_elem_bytes, &aux.top_logprobs,
			      &aux.sampling_mask, &aux.dsa_dim))
		return -1;
	return step_end(shape_sglang_aux(layout, &aux));
}

/* Each layer has its buffer. */
static int buffers_fit(const struct layout *layout, const uint32_t *buffers,
		       uint32_t count, uint32_t layers)
{
	if (count != layers) {
		PyErr_Format(PyExc_ValueError, "%u buffers for %u layers", count, layers);
		return -1;
	}
	for (uint32_t i = 0; i < count; i++) {
		if (buffers[i] >= layout->buffer_count) {
			PyErr_Format(PyExc_ValueError, "buffer %u of %u", buffers[i],
				     layout->buffer_count);
			return -1;
		}
	}
	return 0;
}

static int step_attention(struct layout *layout, PyObject *step)
{
	struct shape_vllm_attention a = {0};
	unsigned long long block_len, head_bytes;
	const char *name, *layers, *buffers;
	Py_ssize_t length, buffer_length;
	unsigned int packing;
	uint32_t count;

	if (!PyArg_ParseTuple(step, "ssIIy#y#KIKIII", &name, &a.view, &a.block_size,
			      &a.blocks, &layers, &length, &buffers, &buffer_length,
			      &block_len, &a.kv_heads, &head_bytes, &packing, &a.tp.size,
			      &a.tp.rank) ||
	    u32s(layers, length, &a.layer_ids, &a.layer_count) < 0 ||
	    u32s(buffers, buffer_length, &a.buffers, &count) < 0 ||
	    buffers_fit(layout, a.buffers, count, a.layer_count) < 0)
		return -1;
	if (packing > SHAPE_VLLM_MLA) {
		PyErr_Format(PyExc_ValueError, "packing: %u", packing);
		return -1;
	}
	a.block_len = block_len;
	a.head_bytes = head_bytes;
	a.packing = (enum shape_vllm_packing)packing;
	return step_end(shape_vllm_attention(layout, &a));
}

static int step_ssm(struct layout *layout, PyObject *step)
{
	struct shape_vllm_ssm ssm = {0};
	const char *name, *layers, *buffers;
	Py_ssize_t length, buffer_length;
	unsigned long long page_len;
	unsigned int kind;
	uint32_t count;

	if (!PyArg_ParseTuple(
		    step, "ssIIKy#y#III(III)III", &name, &ssm.view, &kind, &ssm.pages,
		    &page_len, &layers, &length, &buffers, &buffer_length, &ssm.conv_dim,
		    &ssm.conv_rows, &ssm.conv_elem, &ssm.temporal[0], &ssm.temporal[1],
		    &ssm.temporal[2], &ssm.ssm_elem, &ssm.tp.size, &ssm.tp.rank) ||
	    u32s(layers, length, &ssm.layer_ids, &ssm.layer_count) < 0 ||
	    u32s(buffers, buffer_length, &ssm.buffers, &count) < 0 ||
	    buffers_fit(layout, ssm.buffers, count, ssm.layer_count) < 0)
		return -1;
	if (kind > SHAPE_VLLM_GDN) {
		PyErr_Format(PyExc_ValueError, "kind: %u", kind);
		return -1;
	}
	ssm.kind = (enum shape_vllm_ssm_kind)kind;
	ssm.page_len = page_len;
	return step_end(shape_vllm_ssm(layout, &ssm));
}

static int step_mha(struct layout *layout, PyObject *step)
{
	return step_kv(layout, step, false);
}

static int step_mla(struct layout *layout, PyObject *step)
{
	return step_kv(layout, step, true);
}

static int step_do(struct layout *layout, PyObject *step)
{
	static const struct {
		const char *name;
		int (*make)(struct layout *layout, PyObject *step);
	} makers[] = {
		{"buffer", step_buffer},  {"sglang_mha", step_mha},
		{"sglang_mla", step_mla}, {"sglang_state", step_state},
		{"sglang_aux", step_aux}, {"vllm_attention", step_attention},
		{"vllm_ssm", step_ssm},
	};
	PyObject *first = PyTuple_Check(step) ? PyTuple_GetItem(step, 0) : NULL;
	PyObject *ascii = first ? PyUnicode_AsASCIIString(first) : NULL;
	const char *name = ascii ? PyBytes_AsString(ascii) : NULL;
	int r = -1;

	for (size_t i = 0; name && i < sizeof(makers) / sizeof(makers[0]); i++) {
		if (strcmp(makers[i].name, name) == 0) {
			r = makers[i].make(layout, step);
			break;
		}
	}
	if (r < 0 && !PyErr_Occurred())
		PyErr_SetString(PyExc_ValueError, "no such shape");
	Py_XDECREF(ascii);
	return r;
}

static PyObject *text_of(const struct layout *layout)
{
	PyObject *text = NULL;
	cJSON *json = NULL;
	char *chars;

	if (step_end(layout_check(layout)) < 0 ||
	    step_end(layout_print(layout, &json)) < 0)
		return NULL;
	chars = cJSON_PrintUnformatted(json);
	cJSON_Delete(json);
	if (chars)
		text = PyUnicode_FromString(chars);
	else
		PyErr_NoMemory();
	cJSON_free(chars);
	return text;
}

static PyObject *shapes(PyObject *Py_UNUSED(module), PyObject *args)
{
	struct layout *layout = NULL;
	PyObject *steps, *text = NULL;
	unsigned int rank;
	Py_ssize_t i = 0;

	if (!PyArg_ParseTuple(args, "IO!", &rank, &PyTuple_Type, &steps) ||
	    step_end(shape_new(rank, &layout)) < 0)
		return NULL;
	while (i < PyTuple_Size(steps) && step_do(layout, PyTuple_GetItem(steps, i)) == 0)
		i++;
	if (i == PyTuple_Size(steps))
		text = text_of(layout);
	layout_free(layout);
	return text;
}

/* (first, count) of a rank's heads */
static PyObject *units(PyObject *Py_UNUSED(module), PyObject *args)
{
	unsigned int total, size, rank, first = 0, count = 0;

	if (!PyArg_ParseTuple(args, "III", &total, &size, &rank) ||
	    step_end(shard_units(total, size, rank, &first, &count)) < 0)
		return NULL;
	return Py_BuildValue("II", first, count);
}

static PyMethodDef functions[] = {
	{"shapes", shapes, METH_VARARGS, NULL},
	{"shard_units", units, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_shapes_init(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
