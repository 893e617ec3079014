/* SPDX-License-Identifier: Apache-2.0 */
/* chunk_note: a CHUNK_NOTE to a home of chunks, as its holder writes it. */
#ifndef KVD_TESTS_CHUNK_NOTE_H
#define KVD_TESTS_CHUNK_NOTE_H

#include "daemon/base/cursor.h"
#include "daemon/store/home_key.h"
#include "daemon/store/homes_impl.h"
#include "proto/wire.h"

struct chunk_note {
	bool anew;
	struct cursor out;
	uint8_t notes[HOMES_NOTES_MAX * 16], body[HOMES_NOTES_MAX * 16 + 64];
};

static inline void chunk_note_begin(struct chunk_note *note, bool anew)
{
	note->anew = anew;
	cursor_write(&note->out, note->notes, sizeof(note->notes));
}

/* It has the chunk, or has it no more. */
static inline void chunk_note_add(struct chunk_note *note, const struct home_key *key,
				  bool put)
{
	cursor_put_u64(&note->out, key->id);
	cursor_put_u64(&note->out, key->space | (put ? HOMES_PUT : 0));
}

static inline size_t chunk_note_count(const struct chunk_note *note)
{
	return note->out.pos / 16;
}

/* The message's body, to be read. */
static inline int chunk_note_end(struct chunk_note *note, struct cursor *in)
{
	const struct wire_chunk_note msg = {.anew = note->anew,
					    .notes = {note->notes, note->out.pos}};
	struct cursor out;
	int r;

	cursor_write(&out, note->body, sizeof(note->body));
	r = wire_chunk_note_put(&out, &msg);
	cursor_read(in, note->body, out.pos);
	return r;
}

#endif
