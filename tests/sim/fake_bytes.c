/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's bytes: a side's memory with references of its own, slices
 * gathered from it and scattered into it. The one part of the fake that
 * touches engine memory, on the loop's thread and slice by slice: tests are
 * its only users, and a virtual loop has no other thread to do it.
 *
 * Kinds of memory are honoured as copy.c honours them: guarded memory only
 * under the SIGBUS guard, vm memory only through process_vm_*. Whatever cannot
 * be touched is ERR_FAULT for that transfer.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

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
	off_t at = (off_t)(memory->address + offset);
	ssize_t n = touch->write ? pwrite(memory->mem_fd, touch->bytes, touch->len, at)
				 : pread(memory->mem_fd, touch->bytes, touch->len, at);

	return n == (ssize_t)touch->len
		       ? 0
		       : err_raise(ERR_FAULT, "fake: memory of process %d is gone",
				   (int)memory->owner.pid);
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
		return err_raise(ERR_FAULT,
				 "fake: the memory was truncated by its owner");
	return 0;
}

/* ---- a side ---- */

struct fake_side *fake_side_ref(struct fake_side *side)
{
	side->refs++;
	return side;
}

void fake_side_unref(struct fake_side **side_p)
{
	struct fake_side *side = *side_p;

	*side_p = NULL;
	if (!side || --side->refs > 0)
		return;
	for (uint32_t i = 0; i < side->count; i++)
		memory_unref(side->places[i].memory);
	plan_free(side->plan);
	mem_free(side);
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

static int place_take(struct fake_side *side, const struct xp_buffer *buffer, bool remote)
{
	struct memory *memory = remote ? fake_key_of(buffer->key)->memory
				       : fake_reg_of(buffer->reg)->base.memory;

	if (buffer->offset > memory->length ||
	    buffer->length > memory->length - buffer->offset)
		return err_raise(ERR_RANGE, "fake: buffer %u leaves its memory",
				 side->count);
	side->places[side->count++] =
		(struct fake_place){memory_ref(memory), buffer->offset, buffer->length};
	return 0;
}

static int plan_copy(const struct plan *plan, struct plan **copy_p)
{
	struct plan_builder *builder;
	int r = plan_builder_new(&builder);

	for (size_t i = 0; r == 0 && i < plan->run_count; i++)
		r = plan_builder_add(builder, &plan->runs[i]);
	if (r == 0)
		r = plan_builder_finish(builder, copy_p);
	plan_builder_free(builder);
	return err_pass(r);
}

int fake_side_new(const struct plan *plan, const struct xp_buffer *buffers,
		  uint32_t count, bool remote, struct fake_side **side_p)
{
	struct fake_side *side;
	int r = 0;

	if (remote && !fake_keys_usable(buffers, count))
		return err_raise(ERR_INVAL, "fake: a key of the remote side is missing");
	side = mem_zalloc(sizeof(*side) + count * sizeof(side->places[0]));
	if (!side)
		return err_pass(-ENOMEM);
	side->refs = 1;
	for (uint32_t i = 0; r == 0 && i < count; i++)
		r = place_take(side, &buffers[i], remote);
	if (r == 0)
		r = plan_copy(plan, &side->plan);
	if (r < 0)
		fake_side_unref(&side);
	*side_p = side;
	return err_pass(r);
}

/* ---- slices ---- */

int fake_gather(const struct fake_side *side, uint64_t begin, uint8_t *bytes,
		uint64_t len)
{
	struct plan_walk walk;
	struct plan_span span;
	int r = plan_walk_seek(&walk, side->plan, begin);

	while (r == 0 && len && plan_walk_next(&walk, len, &span)) {
		r = place_touch(&side->places[span.src_buffer], span.src, bytes, span.len,
				false);
		bytes += span.len;
		len -= span.len;
	}
	return err_pass(r);
}

int fake_scatter(const struct fake_side *side, uint64_t begin, uint8_t *bytes,
		 uint64_t len)
{
	struct plan_walk walk;
	struct plan_span span;
	int r = plan_walk_seek(&walk, side->plan, begin);

	while (r == 0 && len && plan_walk_next(&walk, len, &span)) {
		r = place_touch(&side->places[span.dst_buffer], span.dst, bytes, span.len,
				true);
		bytes += span.len;
		len -= span.len;
	}
	return err_pass(r);
}

int fake_stray(const struct fake_side *side, uint64_t begin)
{
	const struct fake_place *place;
	struct plan_walk walk;
	struct plan_span span;
	uint8_t byte = 0xee;
	int r = plan_walk_seek(&walk, side->plan, begin);

	if (r < 0 || !plan_walk_next(&walk, UINT64_MAX, &span))
		return err_pass(r);
	place = &side->places[span.dst_buffer];
	if (place->offset + span.dst + span.len >= place->memory->length)
		return 0;
	return err_pass(place_touch(place, span.dst + span.len, &byte, 1, true));
}
