/* SPDX-License-Identifier: Apache-2.0 */
/*
 * puppet: one daemon's place in a conformance test, without a daemon. It owns a
 * transport, its peers, memory, keys, plans and transfers, does what commands
 * say, and watches that the backend keeps to the contract.
 *
 * Objects are named by slots that the driver chooses, so that a command needs
 * no answer before the next one. A command is the same struct whether the
 * puppet lives in the driver's process (the fake; the driver's own end) or
 * behind a control socket in a process of its own; both run this very binary.
 */
#ifndef TESTS_CONFORM_PUPPET_H
#define TESTS_CONFORM_PUPPET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/transport/transport.h"

struct gpu;
struct puppet;
struct copier;
struct offload;

#define PUPPET_PEERS 4u
#define PUPPET_MEMS 256u
#define PUPPET_KEYS 512u
#define PUPPET_PLANS 2048u
#define PUPPET_SIDES 2048u
#define PUPPET_OPS 2048u
#define PUPPET_INS 16384u
#define PUPPET_BUFFERS 256u
#define PUPPET_ARGS 8u
#define PUPPET_NONE UINT32_MAX

enum cmd_type {
	CMD_ADDRESS,	 /* -> blob: the transport's address */
	CMD_PEER_OPEN,	 /* peer, self, dial; blob: struct cmd_peer */
	CMD_PEER_STATE,	 /* peer -> ready, lost, closed, lost code, path set; blob: words
			  */
	CMD_PEER_CLOSE,	 /* peer */
	CMD_PEER_CLEAR,	 /* peer: forget a closed one */
	CMD_MEM_FD,	 /* mem, kind, length, offset + fd */
	CMD_MEM_VM,	 /* mem, pid, address, length */
	CMD_MEM_LINEAR,	 /* mem, length -> + fd */
	CMD_MEM_DEVICE,	 /* mem, length, VMM: fd; blob: struct gpu_handle */
	CMD_MEM_REG,	 /* mem */
	CMD_MEM_DEREG,	 /* mem */
	CMD_MEM_UNREF,	 /* mem: the region's own reference */
	CMD_MEM_STATE,	 /* mem -> refs, dead, busy, registered, result; blob: words */
	CMD_KEY_PACK,	 /* mem, peer -> blob */
	CMD_KEY_UNPACK,	 /* key, peer; blob */
	CMD_KEY_STATE,	 /* key -> 0 waiting, 1 ready, 2 failed; code */
	CMD_KEY_DROP,	 /* key */
	CMD_PLAN,	 /* plan; blob: struct plan_run[] */
	CMD_PLAN_FREE,	 /* plan */
	CMD_SIDES,	 /* sides, plan; blob: struct cmd_sides + buffers */
	CMD_SIDES_CLEAR, /* sides: requests that name it later are refused */
	CMD_POST,	 /* op, peer, kind, sides, header length, sequence, sides there */
	CMD_OP_STATE,	 /* op -> dones, result, moved, code, hash; blob: words */
	CMD_OP_CLEAR,	 /* op: forget one that is done */
	CMD_CANCEL,	 /* op, code (0: ERR_CANCELED) */
	CMD_POLICY,	 /* enum puppet_policy */
	CMD_IN_COUNT,	 /* -> requests so far */
	CMD_IN_FIND,	 /* sequence -> inbound or PUPPET_NONE */
	CMD_IN_STATE,	 /* in -> kind, header length, header ok, bytes, moved, dones,
			    code, hash; blob: words */
	CMD_LAND,	 /* in, sides */
	CMD_REFUSE,	 /* in, code; blob: words */
	CMD_REVOKE,	 /* in, code; blob: words */
	CMD_LIVE,	 /* -> ops and inbounds that have no done yet */
	CMD_AUDIT,	 /* -> broken promises since the last one; blob: words */
	CMD_FAIL_ALLOC,	 /* n, when: the n-th allocation fails (0: none; enum puppet_fail)
			    -> allocations counted; of the last registration */
	CMD_EXIT,	 /* tear everything down and end */
	CMD_COUNT,
};

/* from when on allocations are counted */
enum puppet_fail {
	FAIL_FROM_POST, /* the next one */
	FAIL_FROM_NOW,
	FAIL_IN_REG, /* mem_reg only, on its helper */
};

enum puppet_policy {
	POLICY_HOLD, /* requests wait for CMD_LAND */
	POLICY_LAND, /* land at once with the sides that the header names */
};

struct cmd {
	uint32_t type;
	uint32_t blob_len;
	uint64_t a[PUPPET_ARGS];
};

struct reply {
	int32_t result; /* of the contract's call */
	uint32_t blob_len;
	uint64_t v[PUPPET_ARGS];
	struct err err;
};

struct cmd_peer {
	uint8_t instance[16];
	uint8_t token_in[XP_TOKEN_BYTES], token_out[XP_TOKEN_BYTES];
	uint32_t address_len;
	uint8_t address[XP_ADDRESS_MAX];
};

/* A buffer of a side: registered memory here, or a key, or neither. */
struct cmd_buffer {
	uint32_t mem, key; /* slots, PUPPET_NONE */
	uint64_t offset, length;
};

/* struct cmd_buffer[src_count + dst_count] follow */
struct cmd_sides {
	uint32_t src_count, dst_count;
	uint32_t hash_mem;   /* hash this memory inside the done callback */
	uint32_t poison_mem; /* overwrite this memory inside the done callback */
};

#define PUPPET_HEADER_MIN 12u /* magic, sides, sequence; shorter ones carry none */
#define PUPPET_POISON 0xdb
#define PUPPET_BLOB_MAX (64u << 20)

/* The header that a puppet sends for these numbers, so that others can check. */
void puppet_header(uint8_t *header, size_t len, uint32_t sides, uint32_t sequence);

/* Takes over nothing; `loop` and what is in env outlive the puppet. */
int puppet_new(const struct transport_ops *ops, const struct xp_env *env,
	       struct puppet **puppet_p);
/* All peers closed (CMD_EXIT does it, over turns of the loop). */
void puppet_free(struct puppet *puppet);
/* After CMD_EXIT: take the next step; true when puppet_free() may be called. */
bool puppet_ended(struct puppet *puppet);
struct transport *puppet_transport(struct puppet *puppet);

/* Do one command. `fd` -1 or the command's; *reply_blob_p is valid until the
 * next call; *reply_fd_p stays the puppet's. */
void puppet_do(struct puppet *puppet, const struct cmd *cmd, const void *blob, int fd,
	       struct reply *reply, const void **reply_blob_p, int *reply_fd_p);

/* The process of a remote puppet or of a vm memory's owner; returns its exit
 * status. */
int puppet_main(const char *backend, int control_fd);

/* tests/conform/backend.c: what a backend needs around it. */
int backend_env_new(const char *name, bool is_virtual, struct xp_env *env_p);
void backend_env_free(struct xp_env *env);
/* Environments made from now on, by other processes too, are of the nth other boot. */
void backend_boot_id(unsigned int n);
/* The GPUs of this process, of the fake driver. */
struct gpu *backend_gpu(void);

#endif
