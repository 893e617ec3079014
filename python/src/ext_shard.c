/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How engines share a model and a request over ranks
 * (shard.h): what an adapter asks to answer as the engine would.
 *
 * Numbers in, tuples out; long lists are bytes of native u32. What the rules divide by
 * is checked here, and how many pieces an answer may have. Words for people are in
 * kvd/shards.py, which is the caller.
 */
#include "python/src/ext.h"

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "python/src/shapes.h"
#include "python/src/shard.h"

#define PIECES_MAX (1u << 20)
#define TOKENS_MAX (UINT64_C(1) << 53)

/* 0, or -1 with an exception; negative results of the plan library become one. */
static int rule_end(int r)
{
	if (r >= 0)
		return 0;
	ext_raise_code((int)err_last()->code, "%s", err_last()->text);
	err_clear();
	return -1;
}

static int positive(const char *name, unsigned long long number)
{
	if (number > 0)
		return 0;
	PyErr_Format(PyExc_ValueError, "%s: 0", name);
	return -1;
}

/* Takes the item's reference. */
static int append(PyObject *list, PyObject *item)
{
	int r = item ? PyList_Append(list, item) : -1;

	Py_XDECREF(item);
	if (r == 0 && PyList_Size(list) > PIECES_MAX) {
		PyErr_Format(PyExc_ValueError, "more than %u pieces", PIECES_MAX);
		return -1;
	}
	return r;
}

static PyObject *units(PyObject *module, PyObject *args)
{
	unsigned int total, size, rank, first = 0, count = 0;

	(void)module;
	if (!PyArg_ParseTuple(args, "III", &total, &size, &rank) ||
	    rule_end(shard_units(total, size, rank, &first, &count)) < 0)
		return NULL;
	return Py_BuildValue("II", first, count);
}

static PyObject *sglang(PyObject *module, PyObject *args)
{
	struct shard_sglang_ranks out = {0};
	struct shard_sglang in = {0};
	int mla, hybrid, all_cp;

	(void)module;
	if (!PyArg_ParseTuple(args, "IIIIIIIppp", &in.prefill_tp, &in.prefill_cp,
			      &in.prefill_pp, &in.decode_tp, &in.decode_pp,
			      &in.decode_rank, &in.decode_pp_rank, &mla, &hybrid,
			      &all_cp))
		return NULL;
	in.mla = mla;
	in.hybrid_mla = hybrid;
	in.all_cp = all_cp;
	if (rule_end(shard_sglang_ranks(&in, &out)) < 0)
		return NULL;
	return Py_BuildValue("IIIIIIIIO", out.tp_first, out.tp_count, out.cp_first,
			     out.cp_count, out.pp_first, out.pp_count, out.dst_info,
			     out.responses, out.dummies ? Py_True : Py_False);
}

static PyObject *vllm(PyObject *module, PyObject *args)
{
	struct shard_vllm in = {0};
	PyObject *bytes = NULL;
	uint32_t *ranks;
	size_t count = 0;
	int mla, state;

	(void)module;
	if (!PyArg_ParseTuple(args, "IIIIpp", &in.local_tp, &in.local_rank, &in.remote_tp,
			      &in.kv_heads, &mla, &state))
		return NULL;
	in.mla = mla;
	if (in.remote_tp > PIECES_MAX)
		return PyErr_Format(PyExc_ValueError, "remote_tp: %u", in.remote_tp);
	ranks = mem_calloc((size_t)in.remote_tp + 1, sizeof(*ranks));
	if (!ranks)
		return PyErr_NoMemory();
	if (rule_end(shard_vllm_sources(&in, state, ranks, in.remote_tp, &count)) == 0)
		bytes = PyBytes_FromStringAndSize((const char *)ranks,
						  (Py_ssize_t)(count * sizeof(*ranks)));
	mem_free(ranks);
	return bytes;
}

static PyObject *cp_pages(PyObject *module, PyObject *args)
{
	unsigned long long pages;
	uint64_t begin, end;
	unsigned int size, rank;

	(void)module;
	if (!PyArg_ParseTuple(args, "KII", &pages, &size, &rank) ||
	    positive("size", size) < 0)
		return NULL;
	if (rank >= size)
		return PyErr_Format(PyExc_ValueError, "rank: %u of %u", rank, size);
	shard_cp_pages(pages, size, rank, &begin, &end);
	return Py_BuildValue("KK", (unsigned long long)begin, (unsigned long long)end);
}

static PyObject *dcp_tokens(PyObject *module, PyObject *args)
{
	unsigned long long chunk_page, prefix, tokens;
	const char *src_pages, *dst_pages;
	Py_ssize_t src_len, dst_len;
	struct shard_dcp in = {0};
	PyObject *both = NULL;
	size_t most, count = 0;
	uint32_t *slots;

	(void)module;
	if (!PyArg_ParseTuple(args, "y#y#IIIKKK", &src_pages, &src_len, &dst_pages,
			      &dst_len, &in.page_size, &in.size, &in.rank, &chunk_page,
			      &prefix, &tokens) ||
	    positive("size", in.size) < 0)
		return NULL;
	in.src_pages = (const uint32_t *)(const void *)src_pages;
	in.dst_pages = (const uint32_t *)(const void *)dst_pages;
	in.src_page_count = (size_t)src_len / sizeof(uint32_t);
	in.dst_page_count = (size_t)dst_len / sizeof(uint32_t);
	in.chunk_page = chunk_page;
	in.prefix = prefix;
	in.tokens = tokens;
	most = in.dst_page_count * in.page_size;
	if (most > (size_t)PIECES_MAX * 16)
		return PyErr_Format(PyExc_ValueError, "dst_pages: %zu tokens", most);
	slots = mem_calloc(2 * most + 1, sizeof(*slots));
	if (!slots)
		return PyErr_NoMemory();
	if (rule_end(shard_dcp_tokens(&in, slots, slots + most, most, &count)) == 0)
		both = Py_BuildValue("y#y#", (const char *)slots,
				     (Py_ssize_t)(count * sizeof(*slots)),
				     (const char *)(slots + most),
				     (Py_ssize_t)(count * sizeof(*slots)));
	mem_free(slots);
	return both;
}

static PyObject *chunks(PyObject *module, PyObject *args)
{
	unsigned long long prompt, page_size, size, prefix;
	struct shard_chunks walk = {0};
	struct shard_chunk one;
	PyObject *list;

	(void)module;
	if (!PyArg_ParseTuple(args, "KKKK", &prompt, &page_size, &size, &prefix) ||
	    positive("page_size", page_size) < 0)
		return NULL;
	if (prefix > prompt || prompt > TOKENS_MAX || size > TOKENS_MAX)
		return PyErr_Format(PyExc_ValueError,
				    "prefix %llu, prompt %llu, chunk %llu: too many",
				    prefix, prompt, size);
	if (size > 0 && (prompt - prefix) / size > PIECES_MAX)
		return PyErr_Format(PyExc_ValueError, "more than %u pieces", PIECES_MAX);
	walk = (struct shard_chunks){.prompt = prompt,
				     .page_size = page_size,
				     .chunk = size,
				     .prefix = prefix};
	list = PyList_New(0);
	while (list && shard_chunks_next(&walk, &one)) {
		PyObject *item = Py_BuildValue(
			"KKKKO", (unsigned long long)one.token_begin,
			(unsigned long long)one.token_end,
			(unsigned long long)one.page_begin,
			(unsigned long long)one.page_end, one.last ? Py_True : Py_False);

		if (append(list, item) < 0)
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *grid(PyObject *module, PyObject *args)
{
	unsigned long long begin, end, base, step;
	PyObject *list;

	(void)module;
	if (!PyArg_ParseTuple(args, "KKKK", &begin, &end, &base, &step) ||
	    positive("grid", step) < 0)
		return NULL;
	if (begin < base)
		return PyErr_Format(PyExc_ValueError, "begin: %llu, before base %llu",
				    begin, base);
	if (end < begin || end > TOKENS_MAX || step > TOKENS_MAX)
		return PyErr_Format(PyExc_ValueError, "[%llu, %llu) by %llu", begin, end,
				    step);
	list = PyList_New(0);
	do { /* what is empty is one piece, too */
		unsigned long long next = shard_grid_end(begin, end, base, step);

		if (append(list, Py_BuildValue("KK", begin, next)) < 0)
			Py_CLEAR(list);
		begin = next;
	} while (list && begin < end);
	return list;
}

static PyObject *blocks_per_page(PyObject *module, PyObject *args)
{
	unsigned long long state_bytes, block_len;

	(void)module;
	if (!PyArg_ParseTuple(args, "KK", &state_bytes, &block_len) ||
	    positive("block_len", block_len) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(
		shape_vllm_blocks_per_page(state_bytes, block_len));
}

static PyObject *window_blocks(PyObject *module, PyObject *args)
{
	unsigned long long window, block_size, blocks;

	(void)module;
	if (!PyArg_ParseTuple(args, "KKK", &window, &block_size, &blocks) ||
	    positive("block_size", block_size) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(
		shape_vllm_window_blocks(window, block_size, blocks));
}

static PyMethodDef functions[] = {
	{"shard_units", units, METH_VARARGS, NULL},
	{"shard_sglang", sglang, METH_VARARGS, NULL},
	{"shard_vllm", vllm, METH_VARARGS, NULL},
	{"shard_cp_pages", cp_pages, METH_VARARGS, NULL},
	{"shard_dcp_tokens", dcp_tokens, METH_VARARGS, NULL},
	{"shard_chunks", chunks, METH_VARARGS, NULL},
	{"shard_grid", grid, METH_VARARGS, NULL},
	{"vllm_blocks_per_page", blocks_per_page, METH_VARARGS, NULL},
	{"vllm_window_blocks", window_blocks, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

int ext_shard_init(PyObject *module)
{
	return PyModule_AddFunctions(module, functions);
}
