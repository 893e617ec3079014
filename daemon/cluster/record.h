/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record: the content of a directory entry about a member, as JSON. docs/cluster.md lists
 * its members. Any client that can write the directory may have written it: it is parsed
 * strictly, and no member of it is longer than here.
 */
#ifndef KVD_CLUSTER_RECORD_H
#define KVD_CLUSTER_RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/cluster/directory.h"
#include "daemon/link/link.h"

struct text;

#define RECORD_VERSION 1
#define RECORD_KEY_CHARS 40u /* Z85 */
#define RECORD_POOLS_MAX 32u
#define RECORD_TRANSPORTS_MAX 8u
#define RECORD_URL_MAX 256u
#define RECORD_SUMMARY_MAX 1024u

struct record_pool {
	char name[64];
	char model[128];
	char digest[17]; /* 16 hex digits; "": not known */
	uint64_t pages;
	uint32_t page_tokens;
};

struct record {
	char instance[33]; /* 32 hex digits, the publisher's; "": a file's line has none
			    */
	char name[64], version[32];	  /* the publisher's; may be "" */
	char endpoint[LINK_ENDPOINT_MAX]; /* tcp://HOST:PORT, without a key */
	char key[RECORD_KEY_CHARS + 1];	  /* of its daemon; "": it has none */
	char transports[RECORD_TRANSPORTS_MAX][16];
	unsigned int transport_count;
	bool draining;
	uint64_t session; /* epoch of the engine's; 0: not known, or no engine's */
	uint32_t size[PLACE_AXES]; /* of the worker, >= 1 */
	struct record_pool pools[RECORD_POOLS_MAX];
	unsigned int pool_count;
	char url[RECORD_URL_MAX];	 /* the engine's HTTP server; "" */
	char engine[32], bootstrap[128]; /* "" */
	char summary[RECORD_SUMMARY_MAX];
};

/* The defaults: one rank of one along each axis, serving. */
void record_init(struct record *record);
/* ERR_TOOBIG: over DIRECTORY_RECORD_MAX; pools at the end are omitted before that.
 * ERR_INVAL names the member; ERR_NOMEM. */
int record_make(const struct record *record, char text_p[DIRECTORY_RECORD_MAX]);
/* ERR_PROTO names the member. */
int record_read(const char *text, struct record *record_p);
/* The same members for a reply to an engine: appended to others, all except endpoint,
 * size, pools and summary; and one of its pools. */
void record_put(struct text *text, const struct record *record);
void record_put_pool(struct text *text, const struct record_pool *pool);
/* "tcp://HOST:PORT#KEY", or without a key. */
void record_dial(const struct record *record, char text[LINK_ENDPOINT_MAX]);
/* An endpoint of that form into endpoint and key. ERR_INVAL. */
int record_reach(struct record *record, const char *endpoint);
/* The record's own checks, of an engine's values. ERR_INVAL names the member. */
int record_check(const struct record *record, const struct place *place);

#endif
