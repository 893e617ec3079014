/* SPDX-License-Identifier: Apache-2.0 */
/* index_update: an INDEX_UPDATE to a home of chunks, as its holder writes it. */
#ifndef KVD_TESTS_INDEX_UPDATE_H
#define KVD_TESTS_INDEX_UPDATE_H

#include "daemon/base/cursor.h"
#include "daemon/store/home_key.h"
#include "daemon/store/homes_impl.h"
#include "proto/wire.h"

struct index_update {
	bool anew;
	struct cursor out;
	uint8_t notes[HOMES_NOTES_MAX * 16], body[HOMES_NOTES_MAX * 16 + 64];
};

static inline void index_update_begin(struct index_update *note, bool anew)
{
	note->anew = anew;
	cursor_write(&note->out, note->notes, sizeof(note->notes));
}

/* It has the chunk, or has it no more. */
static inline void index_update_add(struct index_update *note, const struct home_key *key,
				    bool put)
{
	cursor_put_u64(&note->out, key->id);
	cursor_put_u64(&note->out, key->space | (put ? HOMES_PUT : 0));
}

static inline size_t index_update_count(const struct index_update *note)
{
	return note->out.pos / 16;
}

/* The message's body, to be read. */
static inline int index_update_end(struct index_update *note, struct cursor *in)
{
	const struct wire_index_update msg = {.anew = note->anew,
					      .notes = {note->notes, note->out.pos}};
	struct cursor out;
	int r;

	cursor_write(&out, note->body, sizeof(note->body));
	r = wire_index_update_put(&out, &msg);
	cursor_read(in, note->body, out.pos);
	return r;
}

#endif
