/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_raw: the tcp backend's peer as this program's plain sockets, with the wire's own
 * codec: it may send what it likes, stop in the middle of a frame, or say nothing; up_b
 * is the real backend. Its connections are sealed where `raw.wish` or up_b wants that.
 * Globals, as transport_pair's.
 */
#ifndef KVD_TESTS_LIB_TCP_RAW_H
#define KVD_TESTS_LIB_TCP_RAW_H

#include "tests/lib/transport_pair.h"

#include "daemon/transport/tcp/tcp_impl.h"

#define RAW_STREAMS 2u
#define RAW_FRAME 100000u

/* A connection that is sealed. */
struct raw_seal {
	int fd;
	struct tcp_seal *seal, *open;
	uint8_t records[2][TCP_RECORD_BYTES];
};

struct raw {
	int control, stream[RAW_STREAMS];
	struct tcp_keys keys;
	uint8_t said[TCP_HELLO_BYTES]; /* the last */
	enum tcp_crypto wish, crypto;  /* wanted, agreed */
	struct raw_seal seals[1 + RAW_STREAMS];
	uint64_t next_id;
	struct account *account; /* its principal's, at b */
};

extern struct raw raw;
extern struct up_place raw_place; /* b's memory */
extern struct plan *raw_plan;
extern uint8_t raw_bytes[TCP_DATA_MAX];

/* Setup and teardown: b; and b with raw as its peer. */
int raw_begin(void **state);
int raw_begin_joined(void **state);
int raw_end(void **state);
int raw_end_joined(void **state);

/* ---- sockets ---- */
int raw_connect(void);
void raw_send(int fd, const void *from, size_t len);
bool raw_recv(int fd, void *to, size_t len); /* false: b hung up instead */
bool raw_ended(int fd);

/* ---- the protocol, by hand ---- */
void raw_token_of(uint8_t value, uint8_t token[XP_TOKEN_BYTES]);
void raw_b_waits(void);
/* A control line's hello by who has these tokens; a stream's. */
void raw_hello(int fd, const uint8_t *dialer, const uint8_t *dialed);
void raw_stream_hello(int fd, unsigned int number);
bool raw_control(int fd);
bool raw_stream(int fd, unsigned int number);
void raw_join_now(void);
void raw_join(void); /* b waits, too */
void raw_seals_end(void);
void raw_close(void);
void raw_head(int fd, struct tcp_head head);
void raw_trailer(int fd, bool good);
struct tcp_head raw_next_head(int fd, bool data, void *payload);
/* Ask b to take `rows` rows of RAW_FRAME bytes; the transfer's number. */
uint64_t raw_ask(enum xp_kind kind, uint64_t rows);
void raw_expect_go(uint64_t id);
struct tcp_head raw_expect_done(uint64_t id); /* its text is in raw_bytes */
void raw_frame(unsigned int stream, uint64_t id, uint64_t at, uint8_t fill, bool good);
/* A whole WRITE over that stream: the connection still works. */
void raw_stream_works(unsigned int stream);
/* b is lost to ERR_PROTO with these words; raw joins again. */
void raw_assert_thrown_out(const char *words);

#endif
