/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The submission ring: shared memory in which an engine gives its daemon work
 * without a system call, and the arena beside it, in which lists travel as they
 * lie in memory. `session.share` hands over three descriptors: ring, arena,
 * eventfd. Little-endian, as the machine is.
 *
 * Ring = header (one 4096-byte page), then `entries` entries of 64 bytes. One
 * writer (the engine: kvd_ring_push() below, which is all there is to it), one
 * reader (the daemon). `tail` counts entries given, `head` entries that the
 * daemon has done with; neither wraps. Entry n lies at n % entries. The daemon
 * takes entries in order, and lines of the session's socket behind the entries
 * that were given before them. What an entry says of the arena is the daemon's
 * until head has passed the entry, the engine's afterwards.
 *
 * The daemon sleeps when the ring is empty: then `asleep` is not 0 and whoever
 * pushes writes 1 to the eventfd. While it is awake nobody need call it.
 *
 * Answers. There are none in the ring: what an entry makes lives in a slot of the
 * status page, which the engine chose among its own (first_slot … + slot_count)
 * together with the generation: one more than the slot's word shows, 0 skipped.
 * Until the daemon has taken the entry the word shows the generation before;
 * from then on the state of the new one, KVD_FAILED with a code when the entry
 * was refused. Its number in the commands of the socket is KVD_RING_IDS + slot.
 * A slot is the engine's again when its word shows KVD_FLAG_FREE.
 *
 * An entry that no engine could send by mistake (a slot that is not the engine's
 * or in use, a generation that does not follow, bytes outside the arena, an
 * unknown op) ends the session: kvd and its engine do not agree on what the
 * memory holds. Which ops a daemon knows `session.share` tells (`ops`).
 *
 * Rooms. OPEN, BIND, SEND, CLOSE and EXTEND are room.open, room.bind, room.send,
 * room.close and room.extend without an answer: what is refused fails the room, with the
 * refusal's code in its slot. They name a room by slot and generation, whichever way it
 * was opened; one that is closed, or of another generation, is late, and nothing happens.
 * Their payload is `n1` views (struct kvd_ring_view), one behind the other, then `n2`
 * bytes of JSON text; `bytes` is both. CANCEL and RELEASE of a room's number
 * (KVD_RING_IDS + slot) are ABORT and CLOSE of it.
 *
 * Chunks. FIND, HOLD, PUT and FETCH are chunk.find, chunk.hold or chunk.join, chunk.put
 * and chunk.fetch, each in a new slot; HOLD_FAR is a chunk.hold that asks other daemons,
 * and shows BOOTSTRAPPING until they have answered. What FIND, HOLD and HOLD_FAR found is
 * in the slot: `total` chunks, `bytes` tokens, `rows` of the chunks, the last ones, that
 * are at another daemon, of a joined hold `first_token`: the number of the first chunk.
 * A FIND that was answered has let go of its slot; RELEASE lets go of one that was
 * refused, and closes a hold or a move; CANCEL aborts a move.
 *
 * ATTEND takes a new slot, too, which is free again with the terminal word; its `bytes`
 * are the microseconds that it waited for a processor, `moved_us` those of its attention,
 * `total` how many askers' rows were attended together, each where that was most, `rows`
 * the other daemons that took part. CANCEL ends it; RELEASE
 * before its terminal word does nothing.
 */
#ifndef KVD_RING_LAYOUT_H
#define KVD_RING_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KVD_RING_MAGIC UINT64_C(0x3130474e5244564b) /* "KVDRNG01" */
#define KVD_RING_VERSION 1u
#define KVD_RING_HEADER_BYTES 4096u
#define KVD_RING_ENTRY_BYTES 64u
#define KVD_RING_IDS (UINT64_C(1) << 48)

enum kvd_ring_op {
	/* A descriptor list. a: attach, 0 = own memory; n0: rows; n1: columns of a
	 * row, u64 each: 2 address, bytes; 3 the same and a device, which is not
	 * looked at; 4 address, bytes, stride, count. Word: SUCCESS when prepared. */
	KVD_RING_LIST = 1,
	/* A transfer. a, b: local and remote list; n0, n1: u32 indices into them that
	 * lie one behind the other (0: all rows); behind them `bytes` of notification.
	 * Word: BOOTSTRAPPING until it is posted. */
	KVD_RING_XFER = 2,
	/* a: a transfer that has ended or was never posted; gen: its next; `bytes` of
	 * another notification, with KVD_RING_NOTIFIES. */
	KVD_RING_POST = 3,
	KVD_RING_CANCEL = 4,  /* a: a transfer or room; nothing happens if it has ended */
	KVD_RING_RELEASE = 5, /* a: a transfer (canceled first), a list or a room */
	KVD_RING_NOTIFY = 6,  /* a: attach; `bytes` to its session. No slot. */
	/* A room: by slot and gen, or with gen 0 by a: its number, n0: its role, enum
	 * kvd_role. `bytes` of reason, at most 200. */
	KVD_RING_ABORT = 7,
	/* A room in a new slot. a, b: its number and pool, as in the text; text:
	 * room.open's line without cmd and id; views: its pages, instead of the line's.
	 */
	KVD_RING_OPEN = 8,
	/* views: where the bytes land; text: `wait`'s object, if any. c: slot of the view
	 * "aux", with KVD_RING_AUX. */
	KVD_RING_BIND = 9,
	/* The same of a chunk. b: seq; KVD_RING_LAST. */
	KVD_RING_SEND = 10,
	/* Done with it: its number may be opened again at once. It is aborted if it has
	 * not ended; the slot is free once it has. */
	KVD_RING_CLOSE = 11,
	KVD_RING_EXTEND = 12, /* an offer: c: lease_ms, as room.extend */
	/* a: space; c: number of the first chunk; payload: n0 ids of 32 bytes each. */
	KVD_RING_FIND = 16,
	/* The same; b: lease_ms; before the ids the hold's secret, 16 random bytes. With
	 * n0 0: the hold that has this secret is joined. */
	KVD_RING_HOLD = 17,
	/* a: hold; b: pool; c: deadline_ms, 0: none; payload as BIND's. */
	KVD_RING_FETCH = 18,
	/* a: space; b: pool; c: number of the first chunk; payload: n0 ids, then as
	 * BIND's.
	 */
	KVD_RING_PUT = 19,
	/* As HOLD, of one id at least; n1: far_ms. */
	KVD_RING_HOLD_FAR = 21,
	/* a: attend (attention.open); b: layer; c: deadline_us; n0: seat; payload: n1
	 * parts (struct kvd_ring_part), then their selections in the same order. Word:
	 * TRANSFERRING from when q is the engine's again; SUCCESS: o, m and l are in the
	 * seat. */
	KVD_RING_ATTEND = 24,
};

enum {
	KVD_RING_WRITES = 1 << 0,   /* XFER: local to remote */
	KVD_RING_POSTS = 1 << 1,    /* XFER: and post it */
	KVD_RING_NOTIFIES = 1 << 2, /* XFER, POST: `bytes` of notification, perhaps 0 */
	KVD_RING_LAST = 1 << 3,	    /* SEND: no chunk comes after this one */
	KVD_RING_AUX = 1 << 4,	    /* BIND, SEND: c is a slot of the view "aux" */
	KVD_RING_DURABLE = 1 << 5, /* PUT: it succeeds when all would outlast the power */
	KVD_RING_OWN = 1 << 6,	   /* ATTEND: o, m and l of the seat are a part, too */
	KVD_RING_PUBLISH = 1 << 7, /* PUT: as chunk.publish; a daemon that does not know
				    * it copies */
};

#define KVD_RING_ID_BYTES 32u
#define KVD_RING_SECRET_BYTES 16u

/* Pages of one view, and what of them is meant; behind it page_count numbers of 32 bits,
 * and 4 bytes more when they are odd. */
struct kvd_ring_view {
	char name[32];	      /* NUL within */
	uint64_t first_token; /* of the request, in the first slot of pages[0] */
	uint64_t token_begin, token_end; /* both 0: all that the pages hold */
	uint32_t layer_begin, layer_end; /* both 0: all */
	uint32_t page_count, zero;
	uint32_t pages[];
};

/* Query rows of a seat, and which chunks of a hold they attend to. */
struct kvd_ring_part {
	uint64_t hold;
	uint32_t row, rows;
	uint32_t first, count; /* chunks of the hold */
	uint64_t tokens;       /* from the first one's first on; 0: all */
	int32_t delta;	       /* by how many places the chunks lie behind where they
				* were computed */
	uint32_t per_token;    /* 0: all tokens. Else so many numbers of 32 bits for each
				* query token: tokens of the part, ~0: none */
};

struct kvd_ring_entry {
	uint32_t op, flags;
	uint32_t slot, gen; /* LIST, XFER: the new object's; POST: gen only */
	uint64_t a, b;
	uint64_t offset; /* of the payload in the arena */
	uint32_t n0, n1;
	uint32_t bytes;
	uint32_t n2;
	uint64_t c;
};

struct kvd_ring_header {
	uint64_t magic;
	uint32_t version, entry_bytes;
	uint32_t entries; /* a power of two */
	uint32_t first_slot, slot_count;
	uint32_t reserved0;
	uint64_t arena_bytes;
	uint64_t reserved1[3];
	/* the engine's line */
	uint64_t tail;
	uint64_t reserved2[7];
	/* the daemon's line */
	uint64_t head;
	uint32_t asleep;
	uint32_t reserved3;
	uint64_t reserved4[6];
};

/* What a payload of the entry takes in the arena; UINT64_MAX: too much to be. */
static inline uint64_t kvd_ring_payload(const struct kvd_ring_entry *e)
{
	uint64_t bytes = e->bytes;

	if (e->op == KVD_RING_LIST)
		bytes = e->n1 <= 4 ? (uint64_t)e->n0 * e->n1 * 8 : UINT64_MAX;
	else if (e->op == KVD_RING_XFER)
		bytes += ((uint64_t)e->n0 + e->n1) * 4;
	return bytes;
}

/* What a view takes in a payload. */
static inline uint64_t kvd_ring_view_bytes(uint32_t page_count)
{
	return sizeof(struct kvd_ring_view) + ((uint64_t)page_count + 1) / 2 * 8;
}

/* The generation that follows in a slot. */
static inline uint32_t kvd_ring_next_gen(uint32_t gen)
{
	return gen + 1 ? gen + 1 : 1;
}

/* How many entries find room. */
static inline uint32_t kvd_ring_room(const struct kvd_ring_header *ring, uint32_t entries,
				     uint64_t tail)
{
	uint64_t used = tail - __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);

	return used < entries ? entries - (uint32_t)used : 0;
}

/* Give an entry; there must be room for it. True: the daemon sleeps, write the
 * eventfd. `entries` and `tail` are the caller's own copies. */
static inline bool kvd_ring_push(struct kvd_ring_header *ring, uint32_t entries,
				 uint64_t tail, const struct kvd_ring_entry *entry)
{
	uint64_t words[KVD_RING_ENTRY_BYTES / 8];
	uint64_t *at =
		(uint64_t *)(void *)((char *)ring + KVD_RING_HEADER_BYTES +
				     (tail & (entries - 1)) * KVD_RING_ENTRY_BYTES);

	memcpy(words, entry, sizeof(words));
	for (unsigned int i = 0; i < KVD_RING_ENTRY_BYTES / 8; i++)
		__atomic_store_n(&at[i], words[i], __ATOMIC_RELAXED);
	/* the daemon says "asleep", then looks at the tail; we the other way round */
	__atomic_store_n(&ring->tail, tail + 1, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&ring->asleep, __ATOMIC_SEQ_CST) != 0;
}

#endif
