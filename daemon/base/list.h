/* SPDX-License-Identifier: Apache-2.0 */
/* list: an intrusive doubly linked ring; the head is a node of its own. A node
 * that is in no list points at itself, so list_remove() is idempotent. */
#ifndef KVD_BASE_LIST_H
#define KVD_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/base/mem.h"

struct list {
	struct list *next, *prev;
};

#define LIST_INIT(name)          \
	{                        \
		&(name), &(name) \
	}

static inline void list_init(struct list *l)
{
	l->next = l;
	l->prev = l;
}

static inline bool list_empty(const struct list *l)
{
	return l->next == l;
}

static inline void list_insert_between(struct list *n, struct list *a, struct list *b)
{
	n->prev = a;
	n->next = b;
	a->next = n;
	b->prev = n;
}

static inline void list_push_back(struct list *head, struct list *n)
{
	list_insert_between(n, head->prev, head);
}

static inline void list_push_front(struct list *head, struct list *n)
{
	list_insert_between(n, head, head->next);
}

static inline void list_remove(struct list *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

/* Moves all of `from` to the end of `head`. */
static inline void list_append(struct list *head, struct list *from)
{
	if (list_empty(from))
		return;
	head->prev->next = from->next;
	from->next->prev = head->prev;
	head->prev = from->prev;
	from->prev->next = head;
	list_init(from);
}

static inline struct list *list_pop_front(struct list *head)
{
	struct list *n = head->next;

	if (n == head)
		return NULL;
	list_remove(n);
	return n;
}

#define list_entry(ptr, type, member) container_of(ptr, type, member)
#define list_last(head, type, member) \
	(list_empty(head) ? NULL : list_entry((head)->prev, type, member))
#define list_first(head, type, member) \
	(list_empty(head) ? NULL : list_entry((head)->next, type, member))
/* The body may remove `it`, nothing else of this list. */
#define list_foreach_safe(it, head, member)                                             \
	for (__typeof__(it) it##_next_ =                                                \
		     (it = list_entry((head)->next, __typeof__(*it), member),           \
		     list_entry(it->member.next, __typeof__(*it), member));             \
	     &it->member != (head);                                                     \
	     it = it##_next_, it##_next_ = list_entry(it->member.next, __typeof__(*it), \
						      member))
#define list_foreach(it, head, member)                               \
	for (it = list_entry((head)->next, __typeof__(*it), member); \
	     &it->member != (head);                                  \
	     it = list_entry(it->member.next, __typeof__(*it), member))

#endif
