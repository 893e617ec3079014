/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's bytes: tables of memory with references of their own, slices
 * gathered from them and scattered into them. The one part of the fake that
 * touches engine memory, on the loop's thread and slice by slice: tests are
 * its only users, and a virtual loop has no other thread to do it.
 *
 * Kinds of memory are honoured as copy.c honours them: guarded memory only
 * under the SIGBUS guard, vm memory only through process_vm_*. Whatever cannot
 * be touched is ERR_FAULT for that transfer.
 */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

void fake_table_drop(struct fake_table *table)
{
	for (uint32_t i = 0; i < table->count; i++)
		memory_unref(table->places[i].memory);
	mem_free(table->places);
	*table = (struct fake_table){0};
}

struct touch {
	uint8_t *at;
	uint8_t *bytes;
	size_t len;
	bool write;
};

static void touch_run(void *arg)
{
	struct touch *touch = arg;

	if (touch->write)
		memcpy(touch->at, touch->bytes, touch->len);
	else
		memcpy(touch->bytes, touch->at, touch->len);
}

static int touch_vm(const struct memory *memory, uint64_t offset, struct touch *touch)
{
	struct iovec local = {touch->bytes, touch->len};
	struct iovec remote = {(void *)(uintptr_t)(memory->address + offset), touch->len};
	ssize_t n = touch->write
			    ? process_vm_writev(memory->pid, &local, 1, &remote, 1, 0)
			    : process_vm_readv(memory->pid, &local, 1, &remote, 1, 0);

	return n == (ssize_t)touch->len
		       ? 0
		       : err_raise(ERR_FAULT, "fake: memory of process %d is gone",
				   (int)memory->pid);
}

static int place_touch(const struct fake_place *place, uint64_t offset, uint8_t *bytes,
		       size_t len, bool write)
{
	struct memory *memory = place->memory;
	struct touch touch = {.bytes = bytes, .len = len, .write = write};

	offset += place->offset;
	if (atomic_load(&memory->dead))
		return err_raise(ERR_FAULT, "fake: the memory is dead");
	if (memory->kind == MEMORY_VM)
		return touch_vm(memory, offset, &touch);
	touch.at = memory->base + offset;
	if (memory->kind != MEMORY_GUARDED) {
		touch_run(&touch);
		return 0;
	}
	if (!memory_guard_run(touch_run, &touch, memory, NULL))
		return err_raise(ERR_FAULT, "fake: the memory was cut by its owner");
	return 0;
}

int fake_gather(const struct fake_xfer *x, uint64_t begin, uint8_t *bytes, uint64_t len)
{
	struct plan_walk walk;
	struct plan_span span;
	int r = plan_walk_seek(&walk, x->src_plan, begin);

	while (r == 0 && len && plan_walk_next(&walk, len, &span)) {
		r = place_touch(&x->src.places[span.src_buffer], span.src, bytes,
				span.len, false);
		bytes += span.len;
		len -= span.len;
	}
	return err_pass(r);
}

/* Planted: one byte behind what a row may have. */
static void stray(struct fake_xfer *x, const struct plan_span *span)
{
	struct fake_place *place = &x->dst.places[span->dst_buffer];
	uint8_t byte = 0xee;

	if (x->hub->bug != FAKE_BUG_BYTE_STRAY || x->strayed ||
	    place->offset + span->dst + span->len >= place->memory->length)
		return;
	x->strayed = true;
	if (place_touch(place, span->dst + span->len, &byte, 1, true) < 0)
		err_clear();
}

int fake_scatter(struct fake_xfer *x, uint64_t begin, uint8_t *bytes, uint64_t len)
{
	struct plan_walk walk;
	struct plan_span span;
	int r = plan_walk_seek(&walk, x->dst_plan, begin);

	while (r == 0 && len && plan_walk_next(&walk, len, &span)) {
		r = place_touch(&x->dst.places[span.dst_buffer], span.dst, bytes,
				span.len, true);
		stray(x, &span);
		bytes += span.len;
		len -= span.len;
	}
	return err_pass(r);
}

int fake_table_make(struct fake_table *table, const struct xp_buffer *buffers,
		    uint32_t count, bool remote)
{
	table->places = mem_calloc(count, sizeof(*table->places));
	if (!table->places)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < count; i++) {
		const struct fake_key *key = fake_key_of(buffers[i].key);
		struct memory *memory;

		if (remote && (!key || !key->base.ready))
			return err_raise(ERR_INVAL,
					 "fake: buffer %u of the remote side has no key",
					 i);
		memory = remote ? key->memory : fake_reg_of(buffers[i].reg)->base.memory;
		if (buffers[i].offset > memory->length ||
		    buffers[i].length > memory->length - buffers[i].offset)
			return err_raise(ERR_RANGE, "fake: buffer %u leaves its memory",
					 i);
		table->places[i] = (struct fake_place){
			memory_ref(memory), buffers[i].offset, buffers[i].length};
		table->count = i + 1;
	}
	return 0;
}

bool fake_keys_usable(const struct xp_buffer *buffers, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		const struct fake_key *key = fake_key_of(buffers[i].key);

		if (!key || !key->base.ready)
			return false;
	}
	return true;
}

/* A planted bug walks plans after the caller's right to free them. */
int fake_plan_keep(struct fake_xfer *x, const struct plan **plan_p)
{
	struct plan_builder *builder;
	struct plan *copy = NULL;
	int r;

	if (!x->keep || !*plan_p)
		return 0;
	r = plan_builder_new(&builder);
	for (size_t i = 0; r == 0 && i < (*plan_p)->run_count; i++)
		r = plan_builder_add(builder, &(*plan_p)->runs[i]);
	if (r == 0)
		r = plan_builder_finish(builder, &copy);
	*plan_p = copy;
	plan_builder_free(builder);
	return err_pass(r);
}
