/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out: JSON, written member by member into a text (base/text.h), which keeps a failure
 * until the end. `name` is that of a member of the object that is open, or NULL for an
 * element of an array, or for the whole. Commas are set by need.
 */
#ifndef KVD_PROTO_OUT_H
#define KVD_PROTO_OUT_H

#include "daemon/base/text.h"

void out_object(struct text *out, const char *name); /* until out_close() */
void out_array(struct text *out, const char *name);  /* the same */
void out_close(struct text *out, char bracket);	     /* '}', ']' */
void out_text(struct text *out, const char *name, const char *value);	/* unless NULL */
void out_filled(struct text *out, const char *name, const char *value); /* unless "" */
void out_number(struct text *out, const char *name, int64_t value);
void out_some(struct text *out, const char *name, uint64_t value); /* unless 0 */
/* With as many digits as it needs; null if it is not finite. */
void out_double(struct text *out, const char *name, double value);
void out_bool(struct text *out, const char *name, bool value);
void out_null(struct text *out, const char *name);
/* A decimal string: a number of 64 bits, which many JSON readers would round. */
void out_id(struct text *out, const char *name, uint64_t value);
void out_hex(struct text *out, const char *name, const uint8_t *bytes, size_t len);
void out_base64(struct text *out, const char *name, const uint8_t *bytes, size_t len);
void out_pair(struct text *out, const char *name, uint64_t a, uint64_t b); /* [a, b] */
/* A digest of 64 bits: 16 hex digits. */
void out_digest(struct text *out, const char *name, uint64_t digest);
void out_json(struct text *out, const char *name, const char *json); /* as it is */

#endif
