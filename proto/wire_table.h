/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one table of peer messages. proto/wire.[ch] makes a struct, an encoder,
 * a decoder and the reference page's rows from it.
 *
 * WIRE_MESSAGES(M): M(number, NAME, name, OWNER, body cap in bytes, purpose)
 * WIRE_<NAME>(F):   F(type, field) in wire order. Types:
 *   u8 u16 u32 u64   little-endian
 *   id               16 bytes (instance, token, secret, boot id)
 *   str              at most WIRE_STR_MAX - 1 bytes of text
 *   blob             bytes in place: pointer + length, at most the body cap
 * A receiver skips what a newer sender adds after the last field it knows.
 * Numbers are for ever.
 */
#ifndef KVD_PROTO_WIRE_TABLE_H
#define KVD_PROTO_WIRE_TABLE_H

/* Who gets a message: the part of the daemon that has it (WIRE_OWNER_…). */
#define WIRE_OWNERS(O) O(PEER) O(HANDSHAKE) O(ROOM) O(XFER) O(STORE) O(ATTEND)

/* Numbers of messages that are no more are not used again: 11, 12, 28 to 30, 46 to 51. */
/* clang-format off */
#define WIRE_MESSAGES(M)                                                           \
	M(1, HELLO, hello, PEER, 65536, "first message of a dialler: who I am")    \
	M(2, WELCOME, welcome, PEER, 65536, "the answer to HELLO")                 \
	M(3, PING, ping, PEER, 64, "are you there")                                \
	M(4, PONG, pong, PEER, 64, "the answer to PING")                           \
	M(5, BYE, bye, PEER, 1024, "the sender ends this peer, with the reason")   \
	M(6, REGISTER, register, HANDSHAKE, 1048000, \
	  "a pool or a session's regions, with keys")                              \
	M(7, REGISTER_ACK, register_ack, HANDSHAKE, 64, "the object is usable here") \
	M(8, REGISTER_NAK, register_nak, HANDSHAKE, 1024, \
	  "refused, with the exact difference")                                    \
	M(9, UNREGISTER, unregister, HANDSHAKE, 64, \
	  "the object is going away: use it no more")                              \
	M(10, UNREGISTER_ACK, unregister_ack, HANDSHAKE, 64, \
	  "nothing here uses it any more")                                         \
	M(13, TRANSFER_INFO, transfer_info, ROOM, 1048000, \
	  "a receiver's pages and wants")                                          \
	M(14, TRANSFER_INFO_ACK, transfer_info_ack, ROOM, 64, "the sender has it") \
	M(15, TRANSFER_INFO_NAK, transfer_info_nak, ROOM, 1024, \
	  "the sender refuses it")                                                 \
	M(16, ROOM_DONE, room_done, ROOM, 64, \
	  "the receiver has every byte of the room")                               \
	M(17, ABORT, abort, ROOM, 1024, "this side fails the room; quiesce it")    \
	M(18, ABORT_ACK, abort_ack, ROOM, 64, \
	  "quiesced: no byte of the room can move")                                \
	M(19, OFFER_QUERY, offer_query, ROOM, 1024, "a puller asks for an offer")  \
	M(20, OFFER, offer, ROOM, 1048000, "the offer's pages, generation and lease") \
	M(21, PULL_DONE, pull_done, ROOM, 1024, \
	  "the puller has the bytes: still valid? or gives up")                    \
	M(22, PULL_ACK, pull_ack, ROOM, 1024, "lease epoch unchanged, or the refusal") \
	M(23, LEASE, lease, ROOM, 64, "the puller is alive: extend the lease")     \
	M(24, ATTACH, attach, XFER, 256, \
	  "a session's secret: let my session use yours")                          \
	M(25, ATTACH_ACK, attach_ack, XFER, 64, \
	  "attached; REGISTERs of its regions went before")                        \
	M(26, ATTACH_NAK, attach_nak, XFER, 1024, \
	  "the session is not attached, and why")                                  \
	M(27, OFFER_NAK, offer_nak, ROOM, 1024, \
	  "no such offer, or the puller's pages are outside it")                   \
	M(31, PART, part, PEER, 1048000, \
	  "the next bytes of a message that is too long for a turn")               \
	M(32, LINE, line, HANDSHAKE, 1024, \
	  "the transport of the data line, or why there is none")                  \
	M(33, CHUNK_ASK, chunk_ask, STORE, 140000, \
	  "which of these chunks are there; hold")                                 \
	M(34, CHUNK_TOLD, chunk_told, STORE, 140000, \
	  "those that are there, and where")                                       \
	M(35, CHUNK_LEG, chunk_leg, STORE, 256, \
	  "open an offer of these chunks of a hold")                               \
	M(36, CHUNK_LEG_NAK, chunk_leg_nak, STORE, 1024, \
	  "there is no such offer, and why")                                       \
	M(37, CHUNK_RELEASE, chunk_release, STORE, 64, \
	  "the asker is done with the hold")                                       \
	M(38, CHUNK_FIND, chunk_find, STORE, 1024, "to a home: who has these chunks") \
	M(39, CHUNK_FOUND, chunk_found, STORE, 16384, \
	  "holders, as their homes know them")                                     \
	M(40, CHUNK_NOTE, chunk_note, STORE, 16384, \
	  "to a home: chunks that came and went")                                  \
	M(41, CHUNK_SUM, chunk_sum, STORE, 64, \
	  "to a home: what all notes so far add up to")                            \
	M(42, CHUNK_SUM_ACK, chunk_sum_ack, STORE, 64, \
	  "the home has the same, or wants all")                                   \
	M(43, ATTEND, attend, ATTEND, 600000, \
	  "query rows for chunks of a hold, to attend to")                         \
	M(44, ATTENDED, attended, ATTEND, 1000000, \
	  "what the rows made of these chunks")                                    \
	M(45, ATTEND_STOP, attend_stop, ATTEND, 64, "the asker needs it no more")  \
	M(52, POOLS, pools, HANDSHAKE, 64, \
	  "the REGISTERs before it are all pools of the sender")

/* addresses: count u32, then {str transport, blob address}; product: "kvd 0.1.0" */
#define WIRE_HELLO(F)                                                              \
	F(u16, version_min) F(u16, version_max) F(u64, features) F(u64, nonce)     \
	F(id, boot_id) F(id, token) F(str, name) F(str, endpoint) F(blob, addresses) \
	F(str, product)
#define WIRE_WELCOME(F) WIRE_HELLO(F)
#define WIRE_PING(F) F(u64, stamp)
#define WIRE_PONG(F) F(u64, stamp)
#define WIRE_BYE(F) F(u32, code) F(str, text)
/* kind: 0 pool, 1 session, 2 pool of the daemon's own, which only its id names. layout:
 * layout_encode(), empty for a session.
 * regions: count u32, {u64 region, u64 address, u64 length, u8 kind, blob key};
 * buffers (pools): count u32, {u32 index into regions, u64 offset, u64 length} */
#define WIRE_REGISTER(F)                                                           \
	F(u64, object) F(u8, kind) F(u64, session) F(str, name) F(str, transport)  \
	F(blob, layout) F(blob, regions) F(blob, buffers)
/* pools: how many they are. Once in a peering, when the data line's transport is known;
 * pools that come later follow it */
#define WIRE_POOLS(F) F(u32, pools)
#define WIRE_REGISTER_ACK(F) F(u64, object)
#define WIRE_REGISTER_NAK(F) F(u64, object) F(u64, local_object) F(u32, code) F(str, text)
#define WIRE_UNREGISTER(F) F(u64, object)
#define WIRE_UNREGISTER_ACK(F) F(u64, object)
/* type and total: of the message; at: where in its body these bytes begin. In order, one
 * message of a sender at a time */
#define WIRE_PART(F) F(u16, type) F(u32, total) F(u32, at) F(blob, bytes)
/* From the side with the lower instance id, before any REGISTER of either, and again for
 * each further attempt to connect. text: the transports that it could not connect by;
 * with a code, why there is none. turn: attempts before this one; who sent the first
 * dials in even ones. tried: why its own one before failed. From the other side: with
 * code and text, why its attempt of that turn failed */
#define WIRE_LINE(F) \
	F(str, transport) F(u32, code) F(str, text) F(u32, turn) F(str, tried)
/* request_id, traceparent: what the engine calls its request, "" = nothing.
 * views: count u32, {str name, u64 first_token, u64 token_begin, u64 token_end,
 * blob pages as runs {u32 page, u32 count}}; wants: count u32, plan_want.
 * named: by what the engine named src_pool, POOL_BY_… of handshake.h: where another pool
 * there is meant as well, it is refused.
 * ticket: room.open's, zeroes = it has none */
#define WIRE_TRANSFER_INFO(F)                                                      \
	F(u64, room) F(u64, recv_gen) F(u64, src_pool) F(u64, dst_pool)            \
	F(u32, receivers) F(u8, named) F(blob, views) F(blob, wants)               \
	F(str, request_id) F(str, traceparent) F(id, ticket)
#define WIRE_TRANSFER_INFO_ACK(F)                                                  \
	F(u64, room) F(u64, recv_gen) F(u64, src_pool) F(u64, send_gen)
#define WIRE_TRANSFER_INFO_NAK(F)                                                  \
	F(u64, room) F(u64, recv_gen) F(u64, src_pool) F(u32, code) F(str, text)
#define WIRE_ROOM_DONE(F) F(u64, room) F(u64, recv_gen) F(u64, src_pool)
/* from_role: enum room_role; to_gen 0 = "whoever holds my generation". Of a receiver that
 * the source does not know yet: pool is the source's, 0 = that of any room of the number,
 * of this session if it is not 0;
 * code 0: it takes back what it told so in that generation. from_pool: the receiver's, of
 * which a room knows one generation; another is of another room */
#define WIRE_ABORT(F)                                                              \
	F(u64, room) F(u8, from_role) F(u64, from_gen) F(u64, to_gen) F(u64, pool) \
	F(u64, session) F(u32, code) F(str, text) F(id, ticket) F(u64, from_pool)
/* to_gen: the generation that the ABORT came from */
#define WIRE_ABORT_ACK(F) F(u64, room) F(u64, to_gen)
#define WIRE_OFFER_QUERY(F)                                                        \
	F(u64, room) F(u64, pull_gen) F(u64, src_pool) F(u64, dst_pool)            \
	F(u32, receivers) F(u8, named) F(str, request_id) F(str, traceparent)      \
	F(id, ticket)
/* views as in TRANSFER_INFO */
#define WIRE_OFFER(F)                                                              \
	F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u64, src_pool)           \
	F(u64, lease_epoch) F(u64, lease_ms) F(blob, views)
#define WIRE_OFFER_NAK(F)                                                          \
	F(u64, room) F(u64, pull_gen) F(u64, src_pool) F(u32, code) F(str, text)
#define WIRE_PULL_DONE(F)                                                          \
	F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u64, lease_epoch) F(u32, code) \
	F(str, text)
#define WIRE_PULL_ACK(F)                                                           \
	F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u32, code) F(str, text)
#define WIRE_LEASE(F) F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u64, lease_epoch)
#define WIRE_ATTACH(F) F(u64, cookie) F(u64, session) F(id, secret)
#define WIRE_ATTACH_ACK(F) F(u64, cookie) F(u64, session)
#define WIRE_ATTACH_NAK(F) F(u64, cookie) F(u64, session) F(u32, code) F(str, text)
/* space: the first 16 bytes of SHA-256 of its text, which has the user's name;
 * lease_ms 0: nothing is held; ids: 32 bytes each; none: the hold `ask` stays for so long
 * from now on, which is not answered. first: with CHUNK_ASK_ANYWHERE it is
 * a number in the asker's hold, and the chunks have no place in their prompt */
#define CHUNK_ASK_ANYWHERE (UINT64_C(1) << 63)
#define WIRE_CHUNK_ASK(F)                                                          \
	F(u64, ask) F(id, space) F(u64, first) F(u64, lease_ms) F(blob, ids)
/* runs: pools count u32, {u64 pool}; then count u32, {u32 chunks, u64 mask of pools}:
 * chunks from the first on, each in all of these pools */
#define WIRE_CHUNK_TOLD(F)                                                         \
	F(u64, ask) F(u32, code) F(str, text) F(u64, tokens) F(blob, runs)
/* chunks first … first + count - 1 of the hold, their tokens [begin, end), as they lie
 * in one pool: an offer of that number, and whoever shows the ticket may pull it */
#define WIRE_CHUNK_LEG(F)                                                          \
	F(u64, ask) F(u64, room) F(u64, pool) F(u32, first) F(u32, count) F(u64, begin) \
	F(u64, end) F(id, ticket)
#define WIRE_CHUNK_LEG_NAK(F) F(u64, ask) F(u64, room) F(u32, code) F(str, text)
#define WIRE_CHUNK_RELEASE(F) F(u64, ask)
/* space, ids: a chunk's key, see daemon/store/home_key.h; ids: u64 each, those whose
 * holders matter most first */
#define WIRE_CHUNK_FIND(F) F(u64, ask) F(u64, space) F(blob, ids)
/* holders: count u32, {str endpoint}; then of each id u8 count, {u8 holder}; empty: the
 * daemon is no home */
#define WIRE_CHUNK_FOUND(F) F(u64, ask) F(blob, holders)
/* anew: forget what was told before. notes: {u64 id, u64 space}, the space's highest bit:
 * it came, else it went */
#define WIRE_CHUNK_NOTE(F) F(u8, anew) F(blob, notes)
/* of what came and has not gone: how many, and their keys, mixed, xor */
#define WIRE_CHUNK_SUM(F) F(u64, count) F(u64, sum)
/* again: 0: the same; 1: tell all anew; 2: the daemon is no home */
#define WIRE_CHUNK_SUM_ACK(F) F(u8, again)
/* ask, pool: as in CHUNK_LEG. Of the hold's chunks [first, first + count), as far as
 * `tokens` tokens. form: u8 kind, q_type, kv_type; u16 heads, kv_heads, dqk, dv; u32
 * first_head; f32 scale, softcap; str key, value: fields. rope, where delta is not 0: u32
 * first, dims, u8 pairs, then dims / 2 f64. select: per_token u32 for each query token,
 * or nothing. q: rows of dqk */
#define WIRE_ATTEND(F)                                                             \
	F(u64, attend) F(u64, ask) F(u64, pool) F(u32, first) F(u32, count)        \
	F(u64, tokens) F(str, view) F(u32, layer) F(u32, rows) F(u32, delta)       \
	F(u32, per_token) F(blob, form) F(blob, rope) F(blob, select) F(blob, q)
/* values: rows of dv f32, then a maximum and a sum, f32, for each row; with a code
 * nothing. queue_us, attend_us: how long the rows waited, and were attended; together:
 * how many askers had rows for the same KV */
#define WIRE_ATTENDED(F)                                                           \
	F(u64, attend) F(u32, queue_us) F(u32, attend_us) F(u32, together)         \
	F(u32, code) F(str, text) F(blob, values)
#define WIRE_ATTEND_STOP(F) F(u64, attend)
/* clang-format on */

#endif
