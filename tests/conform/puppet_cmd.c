/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The puppet's commands, one small function each, in a table. Slots come from
 * the driver, which is this same binary: a slot out of range is its bug and
 * stops the test at once.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "gpu/gpu.h"
#include "gpu/import.h"
#include "tests/conform/puppet_impl.h"
#include "tests/gpu/module_wait.h"
#include "tests/lib/gates.h"

#define LONG_HEADER 4096u

struct call {
	struct puppet *puppet;
	const uint64_t *a;
	const void *blob;
	size_t blob_len;
	int fd;
	struct reply *reply;
	const void *out; /* the reply's blob */
	int out_fd;
};

static void say(struct call *call, int result)
{
	call->reply->result = result;
	if (result < 0)
		err_take(&call->reply->err);
}

static const struct transport_ops *ops_of(const struct call *call)
{
	return call->puppet->transport->ops;
}

/* Put an error's words into the reply's blob. */
static void say_words(struct call *call, const struct err *err)
{
	call->out = err->text;
	call->reply->blob_len = (uint32_t)strlen(err->text) + 1;
}

#define SLOT(call, i, array)                                      \
	(assert((call)->a[i] < ARRAY_LEN((call)->puppet->array)), \
	 &(call)->puppet->array[(call)->a[i]])

/* ---- peers ---- */

static void do_address(struct call *call)
{
	call->out = call->puppet->transport->address;
	call->reply->blob_len = (uint32_t)call->puppet->transport->address_len;
	call->reply->v[0] = call->puppet->transport->caps;
}

static void do_peer_open(struct call *call)
{
	struct puppet_peer *entry = SLOT(call, 0, peers);
	const struct cmd_peer *peer = call->blob;
	struct xp_peer_args args = {
		.self = call->a[1] != 0,
		.dial = call->a[2] != 0,
		.address = peer->address,
		.address_len = peer->address_len,
		.owner = entry,
	};

	assert(!entry->peer && call->blob_len == sizeof(*peer));
	memcpy(args.instance, peer->instance, sizeof(args.instance));
	memcpy(args.token_in, peer->token_in, XP_TOKEN_BYTES);
	memcpy(args.token_out, peer->token_out, XP_TOKEN_BYTES);
	say(call, ops_of(call)->peer_open(call->puppet->transport, &args, &entry->peer));
}

static void do_peer_state(struct call *call)
{
	struct puppet_peer *entry = SLOT(call, 0, peers);

	call->reply->v[0] = entry->ready;
	call->reply->v[1] = entry->lost;
	call->reply->v[2] = entry->closed;
	call->reply->v[3] = entry->why.code;
	call->reply->v[4] = entry->peer != NULL;
	say_words(call, &entry->why);
}

static void do_peer_close(struct call *call)
{
	struct puppet_peer *entry = SLOT(call, 0, peers);

	assert(entry->peer && !entry->closing);
	entry->closing = true;
	ops_of(call)->peer_close(entry->peer, puppet_peer_closed, entry);
}

static void do_peer_clear(struct call *call)
{
	struct puppet_peer *entry = SLOT(call, 0, peers);

	assert(!entry->peer || entry->closed);
	*entry = (struct puppet_peer){.puppet = call->puppet};
}

/* ---- memory ---- */

static void mem_set(struct puppet_mem *entry, struct memory *memory)
{
	assert(!entry->reffed && !entry->reg && !entry->job.submitted);
	entry->memory = memory;
	entry->reffed = true;
}

static void do_mem_fd(struct call *call)
{
	struct puppet_mem *entry = SLOT(call, 0, mems);
	struct memory *memory;
	int r;

	if (call->a[1] == MEMORY_GUARDED)
		r = memory_import_shm_fd(call->fd, call->a[3], call->a[2], true, &memory);
	else
		r = memory_import_memfd(call->fd, call->a[3], call->a[2], true, &memory);
	if (r == 0)
		mem_set(entry, memory);
	say(call, r);
}

static void do_mem_vm(struct call *call)
{
	struct memory *memory;
	int r = vm_import_pid((pid_t)call->a[1], call->a[2], call->a[3], &memory);

	if (r == 0)
		mem_set(SLOT(call, 0, mems), memory);
	say(call, r);
}

static void do_mem_linear(struct call *call)
{
	struct memory *memory;
	int r = memory_new_linear(call->a[1], &memory);

	if (r == 0) {
		mem_set(SLOT(call, 0, mems), memory);
		call->out_fd = memory->fd;
	}
	say(call, r);
}

static void do_mem_device(struct call *call)
{
	struct gpu_handle handle;
	struct memory *memory;
	int r;

	assert(call->blob_len == sizeof(handle));
	memcpy(&handle, call->blob, sizeof(handle));
	handle.fd = call->fd;
	r = memory_import_device(backend_gpu(), 1, &handle, 0, call->a[1], true, &memory);
	if (r == 0) {
		/* the first copies shall meet kernels, too, if they are on */
		(void)gpu_module_wait(memory->gpu->device);
		mem_set(SLOT(call, 0, mems), memory);
	}
	say(call, r);
}

static void do_mem_reg(struct call *call)
{
	struct puppet_mem *entry = SLOT(call, 0, mems);

	assert(entry->memory && !entry->reg);
	puppet_mem_job(entry, false);
}

static void do_mem_dereg(struct call *call)
{
	struct puppet_mem *entry = SLOT(call, 0, mems);

	assert(entry->reg);
	puppet_mem_job(entry, true);
}

/* The registration may still hold it; without one the slot is free. */
static void do_mem_unref(struct call *call)
{
	struct puppet_mem *entry = SLOT(call, 0, mems);

	assert(entry->reffed && !entry->job.submitted);
	memory_unref(entry->memory);
	entry->reffed = false;
	if (!entry->reg)
		entry->memory = NULL;
}

static void do_mem_state(struct call *call)
{
	struct puppet_mem *entry = SLOT(call, 0, mems);

	call->reply->v[2] = entry->job.submitted;
	if (entry->job.submitted)
		return; /* all else is the helper's now */
	if (entry->memory) {
		call->reply->v[0] = (uint64_t)atomic_load(&entry->memory->refs);
		call->reply->v[1] = atomic_load(&entry->memory->dead);
	}
	call->reply->v[3] = entry->reg != NULL;
	call->reply->v[4] = (uint64_t)(int64_t)entry->job.result;
	call->reply->v[5] = entry->job.err.code;
	say_words(call, &entry->job.err);
}

/* ---- keys ---- */

static void do_key_pack(struct call *call)
{
	struct puppet_mem *entry = SLOT(call, 0, mems);
	size_t len = 0;

	assert(entry->reg);
	say(call, ops_of(call)->key_pack(entry->reg, SLOT(call, 1, peers)->peer,
					 call->puppet->answer, XP_KEY_MAX, &len));
	call->out = call->puppet->answer;
	call->reply->blob_len = (uint32_t)len;
}

static void do_key_unpack(struct call *call)
{
	struct puppet_key *entry = SLOT(call, 0, keys);
	struct puppet_peer *peer = SLOT(call, 1, peers);
	int r;

	assert(!entry->key);
	*entry = (struct puppet_key){0};
	r = ops_of(call)->key_unpack(peer->peer, call->blob, call->blob_len, entry,
				     &entry->key);
	if (r < 0)
		entry->key = NULL;
	else if (((const struct xp_key_base *)(const void *)entry->key)->ready)
		entry->state = 1;
	say(call, r);
}

static void do_key_state(struct call *call)
{
	struct puppet_key *entry = SLOT(call, 0, keys);

	call->reply->v[0] = entry->state;
	call->reply->v[1] = entry->why.code;
	say_words(call, &entry->why);
}

static void do_key_drop(struct call *call)
{
	struct puppet_key *entry = SLOT(call, 0, keys);

	if (entry->key)
		ops_of(call)->key_drop(entry->key);
	*entry = (struct puppet_key){0};
}

/* ---- plans and sides ---- */

static void do_plan(struct call *call)
{
	struct plan **plan_p = SLOT(call, 0, plans);
	const struct plan_run *runs = call->blob;
	struct plan_builder *builder;
	int r = plan_builder_new(&builder);

	assert(!*plan_p && call->blob_len % sizeof(*runs) == 0);
	for (size_t i = 0; r == 0 && i < call->blob_len / sizeof(*runs); i++)
		r = plan_builder_add(builder, &runs[i]);
	if (r == 0)
		r = plan_builder_finish(builder, plan_p);
	plan_builder_free(builder);
	if (r == 0) {
		call->reply->v[0] = (*plan_p)->bytes;
		call->reply->v[1] = (*plan_p)->digest;
	}
	say(call, r);
}

static void do_plan_free(struct call *call)
{
	struct plan **plan_p = SLOT(call, 0, plans);

	plan_free(*plan_p);
	*plan_p = NULL;
}

static void do_sides(struct call *call)
{
	struct puppet_sides *entry = SLOT(call, 0, sides);
	const struct cmd_sides *head = call->blob;
	const struct cmd_buffer *wanted = (const void *)(head + 1);
	uint32_t count = head->src_count + head->dst_count;

	assert(call->blob_len == sizeof(*head) + count * sizeof(*wanted));
	puppet_sides_clear(entry);
	entry->buffers = mem_calloc(count, sizeof(*entry->buffers));
	assert(entry->buffers);
	for (uint32_t i = 0; i < count; i++) {
		struct xp_buffer *buffer = &entry->buffers[i];

		if (wanted[i].mem != PUPPET_NONE)
			buffer->reg = call->puppet->mems[wanted[i].mem].reg;
		if (wanted[i].key != PUPPET_NONE)
			buffer->key = call->puppet->keys[wanted[i].key].key;
		buffer->offset = wanted[i].offset;
		buffer->length = wanted[i].length;
	}
	entry->hash_mem = head->hash_mem;
	entry->poison_mem = head->poison_mem;
	entry->sides = (struct xp_sides){
		.plan = *SLOT(call, 1, plans),
		.src = entry->buffers,
		.dst = entry->buffers + head->src_count,
		.src_count = head->src_count,
		.dst_count = head->dst_count,
	};
}

static void do_sides_clear(struct call *call)
{
	puppet_sides_clear(SLOT(call, 0, sides));
}

/* ---- ops ---- */

static struct puppet_op *op_new(struct call *call)
{
	struct puppet_op *entry = calloc(1, sizeof(*entry));
	size_t len = call->a[4];

	assert(entry);
	entry->header = calloc(1, len + 1);
	assert(entry->header);
	puppet_header(entry->header, len, (uint32_t)call->a[6], (uint32_t)call->a[5]);
	entry->puppet = call->puppet;
	entry->peer = (uint32_t)call->a[1];
	if (call->a[3] != PUPPET_NONE)
		entry->sides = SLOT(call, 3, sides);
	entry->op = (struct xp_op){
		.kind = (enum xp_kind)call->a[2],
		.header = entry->header,
		.header_len = len,
		.on_done = puppet_on_op_done,
		.on_first = puppet_on_op_first,
		.owner = entry,
	};
	/* every other long header is one that the backend may keep */
	if (len >= LONG_HEADER && len % 2 == 0)
		entry->op.owned = mem_dup(entry->header, len);
	if (entry->op.owned) {
		entry->op.header = entry->op.owned;
		free(entry->header);
		entry->header = NULL;
	}
	if (entry->sides)
		entry->op.sides = entry->sides->sides;
	return entry;
}

static void do_post(struct call *call)
{
	struct puppet_op **slot = SLOT(call, 0, ops);
	struct puppet_op *entry = op_new(call);
	int r;

	assert(!*slot);
	*slot = entry;
	call->puppet->inside = "post";
	entry->posted = true; /* a done from inside is reported as that */
	if (call->puppet->fail_alloc)
		mem_fail_at(call->puppet->fail_alloc);
	r = ops_of(call)->post(SLOT(call, 1, peers)->peer, &entry->op);
	call->puppet->inside = NULL;
	entry->posted = r == 0;
	if (r < 0 && entry->op.impl)
		puppet_broken(call->puppet, "a refused post left op->impl");
	say(call, r);
}

static void do_op_state(struct call *call)
{
	struct puppet_op *entry = *SLOT(call, 0, ops);

	assert(entry);
	call->reply->v[0] = entry->dones;
	call->reply->v[1] = (uint64_t)(int64_t)entry->op.result;
	call->reply->v[2] = entry->op.moved;
	call->reply->v[3] = entry->op.err.code;
	call->reply->v[4] = entry->hash;
	say_words(call, &entry->op.err);
}

static void do_op_clear(struct call *call)
{
	struct puppet_op **slot = SLOT(call, 0, ops);

	assert(*slot && (!(*slot)->posted || (*slot)->dones));
	free((*slot)->header);
	mem_free((*slot)->op.owned);
	free(*slot);
	*slot = NULL;
}

static void do_cancel(struct call *call)
{
	struct puppet_op *entry = *SLOT(call, 0, ops);
	struct err why;

	assert(entry);
	if (entry->dones)
		return; /* it won the race; the contract ends at on_done */
	err_set(&why, call->a[1] ? (enum err_code)call->a[1] : ERR_CANCELED,
		"canceled by the test");
	call->puppet->inside = "cancel";
	ops_of(call)->cancel(&entry->op, &why);
	call->puppet->inside = NULL;
}

/* ---- inbounds ---- */

static void do_policy(struct call *call)
{
	call->puppet->policy = (enum puppet_policy)call->a[0];
}

static void do_in_count(struct call *call)
{
	call->reply->v[0] = call->puppet->in_count;
}

static void do_in_find(struct call *call)
{
	call->reply->v[0] = PUPPET_NONE;
	for (uint32_t i = call->puppet->in_count; i-- > 0;) {
		if (call->puppet->ins[i].sequence == call->a[0]) {
			call->reply->v[0] = i;
			return;
		}
	}
}

static void do_in_state(struct call *call)
{
	struct puppet_in *entry = SLOT(call, 0, ins);

	call->reply->v[0] = entry->kind;
	call->reply->v[1] = entry->header_len;
	call->reply->v[2] = entry->header_ok;
	call->reply->v[3] = entry->bytes;
	call->reply->v[4] = entry->in ? entry->in->moved : entry->moved;
	call->reply->v[5] = entry->dones;
	call->reply->v[6] = entry->failed ? entry->err.code : 0;
	call->reply->v[7] = entry->hash;
	if (entry->failed)
		say_words(call, &entry->err);
}

static void do_land(struct call *call)
{
	struct puppet_in *entry = SLOT(call, 0, ins);

	if (entry->in)
		puppet_land(call->puppet, entry, (uint32_t)call->a[1]);
}

static void do_refuse(struct call *call)
{
	struct puppet_in *entry = SLOT(call, 0, ins);
	struct err err;

	if (!entry->in)
		return;
	err_set(&err, (enum err_code)call->a[1], "%s", (const char *)call->blob);
	entry->answered = true;
	call->puppet->inside = "land";
	ops_of(call)->land(entry->in, NULL, &err);
	call->puppet->inside = NULL;
}

static void do_revoke(struct call *call)
{
	struct puppet_in *entry = SLOT(call, 0, ins);
	struct err err;

	if (!entry->in)
		return; /* it won the race */
	err_set(&err, (enum err_code)call->a[1], "%s", (const char *)call->blob);
	call->puppet->inside = "revoke";
	ops_of(call)->revoke(entry->in, &err);
	call->puppet->inside = NULL;
}

/* ---- the whole ---- */

static void do_live(struct call *call)
{
	struct puppet *puppet = call->puppet;

	for (uint32_t i = 0; i < PUPPET_OPS; i++)
		call->reply->v[0] += puppet->ops[i] && puppet->ops[i]->posted &&
				     !puppet->ops[i]->dones;
	for (uint32_t i = 0; i < puppet->in_count; i++)
		call->reply->v[1] += puppet->ins[i].in != NULL;
}

static void do_audit(struct call *call)
{
	struct puppet *puppet = call->puppet;

	call->reply->v[0] = puppet->broken;
	memcpy(puppet->answer, puppet->words, sizeof(puppet->words));
	call->out = puppet->answer;
	call->reply->blob_len = sizeof(puppet->words);
	puppet->broken = 0;
	puppet->words[0] = '\0';
}

static void do_fail_alloc(struct call *call)
{
	struct puppet *puppet = call->puppet;

	call->reply->v[0] = mem_count();
	call->reply->v[1] = puppet->reg_count;
	puppet->fail_alloc = call->a[1] == FAIL_FROM_POST ? call->a[0] : 0;
	puppet->fail_reg = call->a[1] == FAIL_IN_REG ? call->a[0] : 0;
	mem_fail_at(call->a[1] == FAIL_FROM_NOW ? call->a[0] : 0);
}

static void do_exit(struct call *call)
{
	puppet_end_step(call->puppet);
}

static void (*const table[CMD_COUNT])(struct call *call) = {
	[CMD_ADDRESS] = do_address,
	[CMD_PEER_OPEN] = do_peer_open,
	[CMD_PEER_STATE] = do_peer_state,
	[CMD_PEER_CLOSE] = do_peer_close,
	[CMD_PEER_CLEAR] = do_peer_clear,
	[CMD_MEM_FD] = do_mem_fd,
	[CMD_MEM_VM] = do_mem_vm,
	[CMD_MEM_LINEAR] = do_mem_linear,
	[CMD_MEM_DEVICE] = do_mem_device,
	[CMD_MEM_REG] = do_mem_reg,
	[CMD_MEM_DEREG] = do_mem_dereg,
	[CMD_MEM_UNREF] = do_mem_unref,
	[CMD_MEM_STATE] = do_mem_state,
	[CMD_KEY_PACK] = do_key_pack,
	[CMD_KEY_UNPACK] = do_key_unpack,
	[CMD_KEY_STATE] = do_key_state,
	[CMD_KEY_DROP] = do_key_drop,
	[CMD_PLAN] = do_plan,
	[CMD_PLAN_FREE] = do_plan_free,
	[CMD_SIDES] = do_sides,
	[CMD_SIDES_CLEAR] = do_sides_clear,
	[CMD_POST] = do_post,
	[CMD_OP_STATE] = do_op_state,
	[CMD_OP_CLEAR] = do_op_clear,
	[CMD_CANCEL] = do_cancel,
	[CMD_POLICY] = do_policy,
	[CMD_IN_COUNT] = do_in_count,
	[CMD_IN_FIND] = do_in_find,
	[CMD_IN_STATE] = do_in_state,
	[CMD_LAND] = do_land,
	[CMD_REFUSE] = do_refuse,
	[CMD_REVOKE] = do_revoke,
	[CMD_LIVE] = do_live,
	[CMD_AUDIT] = do_audit,
	[CMD_FAIL_ALLOC] = do_fail_alloc,
	[CMD_EXIT] = do_exit,
};

void puppet_do(struct puppet *puppet, const struct cmd *cmd, const void *blob, int fd,
	       struct reply *reply, const void **reply_blob_p, int *reply_fd_p)
{
	struct call call = {.puppet = puppet,
			    .a = cmd->a,
			    .blob = blob,
			    .blob_len = cmd->blob_len,
			    .fd = fd,
			    .reply = reply,
			    .out_fd = -1};

	assert(cmd->type < CMD_COUNT);
	memset(reply, 0, sizeof(*reply));
	table[cmd->type](&call);
	*reply_blob_p = call.out;
	*reply_fd_p = call.out_fd;
}
