/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fields: the members of a JSON object, bound to the members of a struct.
 *
 * A table defines the name, the limits and the destination of each member:
 *
 *	struct send_args { uint64_t room; int64_t aux; };
 *	static const struct field send_fields[] = {
 *		F_U64("room", send_args, room, REQUIRED, "Number of the room"),
 *		F_INT("aux", send_args, aux, DEFAULT(-1), 0, INT32_MAX, "slot"),
 *		F_END,
 *	};
 *
 * fields_read() fills the struct; help and the reference page use the same table. The
 * macros do not compile if the member's type differs from the field's, or if a limit does
 * not fit it.
 */
#ifndef KVD_PROTO_FIELDS_H
#define KVD_PROTO_FIELDS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/json.h"

enum field_type {
	FIELD_STR,    /* const char *, of the tree; limit: bytes */
	FIELD_INT,    /* an integer of 4 or 8 bytes; min … max */
	FIELD_U64,    /* uint64_t; a decimal string (or small number) */
	FIELD_BOOL,   /* bool */
	FIELD_NUMBER, /* double, finite; 0 when absent */
	FIELD_CHOICE, /* int: index in `names` of the string */
	FIELD_ARRAY,  /* const cJSON *; limit: entries */
	FIELD_OBJECT, /* const cJSON * */
	FIELD_FD,     /* int: the index of a descriptor of the line; -1 when absent */
};

struct field {
	const char *name; /* NULL: end of the table */
	enum field_type type;
	bool required;
	int64_t min, max; /* INT: range. STR, ARRAY: max = limit, 0: none */
	const char *help;
	int64_t preset;		  /* value of absent numbers and choices */
	const char *const *names; /* CHOICE; ends with NULL */
	uint16_t at, bytes;	  /* offset of the struct's member */
};

/* The largest struct that a table may fill. */
#define FIELDS_BYTES_MAX 192u

/* The values for `need` in a macro; absent strings, arrays and objects are NULL. */
#define REQUIRED .required = true
#define OPTIONAL .required = false
#define DEFAULT(value) .preset = (value)

#define FIELD_MEMBER(args, member) (((struct args *)0)->member)
#define FIELD_IS(args, member, type) \
	__builtin_types_compatible_p(__typeof__(FIELD_MEMBER(args, member)), type)
#define FIELD_HOLDS(args, member, max)                                \
	(sizeof(FIELD_MEMBER(args, member)) == 8 ||                   \
	 (FIELD_IS(args, member, uint32_t) && (max) <= UINT32_MAX) || \
	 (FIELD_IS(args, member, int) && (max) <= INT32_MAX))
/* 0; does not compile unless `ok` */
#define FIELD_CHECK(ok, text)              \
	(0 * sizeof(struct {               \
		 _Static_assert(ok, text); \
		 char c;                   \
	 }))
#define FIELD(name_, type_, args, member, fits, text, ...)                              \
	{                                                                               \
		.name = name_, .type = type_, .help = text,                             \
		.at = (uint16_t)(offsetof(struct args, member) +                        \
				 FIELD_CHECK(sizeof(struct args) <= FIELDS_BYTES_MAX,   \
					     #args " is too large") +                   \
				 FIELD_CHECK(fits, #member " cannot hold this field")), \
		.bytes = sizeof(FIELD_MEMBER(args, member)), __VA_ARGS__                \
	}
#define F_END                \
	{                    \
		.name = NULL \
	}

/* name in JSON, struct, its member, REQUIRED, OPTIONAL or DEFAULT(), limits, help */
#define F_STR(name, s, m, need, limit, text)                                   \
	FIELD(name, FIELD_STR, s, m, FIELD_IS(s, m, const char *), text, need, \
	      .max = limit)
#define F_INT(name, s, m, need, least, most, text)                                      \
	FIELD(name, FIELD_INT, s, m, FIELD_HOLDS(s, m, most), text, need, .min = least, \
	      .max = most)
/* a number assigned by the daemon: 0 … 2^53 - 1 */
#define F_ID(name, s, m, need, text) F_INT(name, s, m, need, 0, JSON_INT_MAX, text)
#define F_U64(name, s, m, need, text) \
	FIELD(name, FIELD_U64, s, m, FIELD_IS(s, m, uint64_t), text, need)
#define F_BOOL(name, s, m, text) \
	FIELD(name, FIELD_BOOL, s, m, FIELD_IS(s, m, bool), text, OPTIONAL)
#define F_NUMBER(name, s, m, need, text) \
	FIELD(name, FIELD_NUMBER, s, m, FIELD_IS(s, m, double), text, need)
#define F_CHOICE(name, s, m, need, all, text) \
	FIELD(name, FIELD_CHOICE, s, m, FIELD_IS(s, m, int), text, need, .names = all)
#define F_ARRAY(name, s, m, need, limit, text)                                    \
	FIELD(name, FIELD_ARRAY, s, m, FIELD_IS(s, m, const cJSON *), text, need, \
	      .max = limit)
#define F_OBJECT(name, s, m, need, text) \
	FIELD(name, FIELD_OBJECT, s, m, FIELD_IS(s, m, const cJSON *), text, need)
#define F_FD(name, s, m, text) \
	FIELD(name, FIELD_FD, s, m, FIELD_IS(s, m, int), text, DEFAULT(-1))

/* A validated string, which fits `dst`; absent: "". */
static inline void field_copy(char *dst, size_t size, const char *text)
{
	snprintf(dst, size, "%s", text ? text : "");
}
/* NULL: no field has this name. */
const struct field *field_find(const struct field *fields, const char *name);
/* Fill *args, or report a field that is missing, of the wrong type or outside its
 * limits (ERR_INVAL, ERR_RANGE by name). Other members of `obj` are ignored. */
int fields_read(const struct field *fields, const cJSON *obj, void *args);
/* The same, but unknown members are refused: "<name>: unknown member". */
int fields_read_all(const struct field *fields, const cJSON *obj, void *args);

#endif
