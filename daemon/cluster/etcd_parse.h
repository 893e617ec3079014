/* SPDX-License-Identifier: Apache-2.0 */
/*
 * etcd_parse: parses replies of etcd's JSON gateway incrementally, in pieces of any
 * length and in bounded memory: a page of a range, or a message of a watch, may be as
 * long as the keys that other clients have put. Only the fields that a directory needs
 * are kept.
 */
#ifndef KVD_CLUSTER_ETCD_PARSE_H
#define KVD_CLUSTER_ETCD_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/cluster/directory.h"
#include "proto/base64.h"

#define ETCD_KEY_MAX 1020u /* bytes of a key of ours, and more; a multiple of 3 */
#define ETCD_VALUE_MAX DIRECTORY_RECORD_MAX
#define ETCD_TEXT_MAX 256u   /* of messages, with the NUL */
#define ETCD_TOKEN_MAX 1024u /* with the NUL: a JWT, signed by a key of 4096 bits */
#define ETCD_DEPTH_MAX 16u

/* One reply, or one message of a stream. Absent members are 0, false or "". */
struct etcd_message {
	uint64_t revision;
	uint64_t lease, ttl;
	int64_t watch_id;
	uint64_t compact_revision;
	uint64_t error_code; /* gRPC's; 0: none */
	unsigned int kvs;    /* that this message had */
	bool failed;	     /* it has `error` */
	bool created, canceled, more;
	bool succeeded; /* of the transaction */
	bool nested;	/* of the one in its failure branch */
	char error[ETCD_TEXT_MAX];
	char reason[ETCD_TEXT_MAX]; /* why a watch was canceled */
	char token[ETCD_TOKEN_MAX];
};

/* One key. Key and value end with a NUL, and may contain others. */
struct etcd_kv {
	bool deleted;
	bool key_cut; /* longer than ETCD_KEY_MAX: truncated */
	bool bad;     /* not base64, or the value is longer than ETCD_VALUE_MAX */
	size_t key_len, value_len;
	uint64_t revision; /* of its last change */
	uint64_t lease;
	uint8_t key[ETCD_KEY_MAX + 4], value[ETCD_VALUE_MAX + 4];
};

struct etcd_parser {
	/* In the order of the text. */
	void (*on_kv)(struct etcd_parser *parser, const struct etcd_kv *kv);
	/* Its end. */
	void (*on_message)(struct etcd_parser *parser,
			   const struct etcd_message *message);
	/* private */
	struct etcd_kv kv;
	uint8_t depth, escape;		   /* characters of an escape to come */
	bool arrays[ETCD_DEPTH_MAX + 1];   /* the containers: is it an array, */
	size_t begins[ETCD_DEPTH_MAX + 1]; /* and where it starts */
	bool failed, in_string, cut;
	size_t string;	  /* where the current one starts */
	unsigned int kvs; /* of the current message */
	uint64_t messages;
	size_t len; /* of buf: the current message, without its keys */
	char buf[4 * BASE64_CHARS(ETCD_VALUE_MAX)];
};

void etcd_parser_init(struct etcd_parser *parser);
/* ERR_PROTO: not JSON, or not etcd's form; ERR_NOMEM. It accepts no more then. */
int etcd_parser_feed(struct etcd_parser *parser, const char *bytes, size_t len);
/* May the text end here? */
bool etcd_parser_whole(const struct etcd_parser *parser);

#endif
