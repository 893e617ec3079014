/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seqlock: words that one thread writes and others, of this or another process, read
 * without a lock: all of one moment.
 *
 * The writer makes the sequence odd, stores the words, makes it even. A reader copies the
 * words between two reads of the sequence. All shared words are atomic, the writer's
 * stored with release and the reader's loaded with acquire order: so a reader that has
 * got one word of a new row also sees the odd sequence before it, and detects it at its
 * second read, and a sequence found even has all words of its row behind it. Fences would
 * do the same at lower cost on weakly ordered processors, but thread sanitizers do not
 * understand them; on x86-64 these loads and stores are plain.
 */
#ifndef KVD_BASE_SEQLOCK_H
#define KVD_BASE_SEQLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SEQLOCK_TRIES 64u

static inline uint64_t seqlock_get(const uint64_t *where)
{
	return __atomic_load_n(where, __ATOMIC_ACQUIRE);
}

static inline void seqlock_put(uint64_t *where, uint64_t value)
{
	__atomic_store_n(where, value, __ATOMIC_RELEASE);
}

/* `row` is `count` words of any type. */
static inline void seqlock_write(uint64_t *sequence, uint64_t *words, const void *row,
				 size_t count)
{
	uint64_t odd = *sequence | 1; /* only we write it */
	const uint8_t *from = row;

	seqlock_put(sequence, odd);
	for (size_t i = 0; i < count; i++) {
		uint64_t word;

		memcpy(&word, from + i * sizeof(word), sizeof(word));
		seqlock_put(&words[i], word);
	}
	seqlock_put(sequence, odd + 1);
}

/* False after SEQLOCK_TRIES: it is being written, or its writer died while writing; then
 * `row` is invalid. */
static inline bool seqlock_read(const uint64_t *sequence, const uint64_t *words,
				void *row, size_t count)
{
	uint8_t *to = row;

	for (unsigned int tries = 0; tries < SEQLOCK_TRIES; tries++) {
		uint64_t before = seqlock_get(sequence);

		if (before & 1)
			continue;
		for (size_t i = 0; i < count; i++) {
			uint64_t word = seqlock_get(&words[i]);

			memcpy(to + i * sizeof(word), &word, sizeof(word));
		}
		if (seqlock_get(sequence) == before)
			return true;
	}
	return false;
}

#endif
